"""The sampler as its definition reads: one row at a time, plain Python, nothing clever."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pageturner.service.core.outputs import (
    SampleRow,
    ScheduledSequence,
    SchedulerOutput,
    record,
)
from pageturner.service.core.sampling_params import SamplingParams


def edited_logits(logits: Sequence[float], row: SampleRow) -> list[float]:
    """Bias, repetition, presence and frequency penalties, bans."""
    edited = list(logits)
    params = row.params
    for token_id, bias in params.logit_bias:
        edited[token_id] += bias
    for token_id in set(row.prompt_token_ids) | set(row.output_token_ids):
        value = edited[token_id]
        factor = params.repetition_penalty
        edited[token_id] = value / factor if value > 0 else value * factor
    for token_id in set(row.output_token_ids):
        count = row.output_token_ids.count(token_id)
        edited[token_id] -= params.presence_penalty + params.frequency_penalty * count
    for token_id in row.banned_token_ids:
        edited[token_id] = -math.inf
    return edited


def allowed_probabilities(logits: Sequence[float], row: SampleRow) -> dict[int, float]:
    """Token id -> probability, for the tokens that may be drawn. Not for temperature 0."""
    params = row.params
    edited = edited_logits(logits, row)
    best = max(edited)
    weight = [math.exp((value - best) / params.temperature) for value in edited]
    order = sorted(range(len(weight)), key=lambda token_id: (-weight[token_id], token_id))
    order = [token_id for token_id in order if weight[token_id] >= params.min_p * weight[order[0]]]
    if params.top_k:
        order = order[: params.top_k]
    mass = sum(weight[token_id] for token_id in order)
    kept: list[int] = []
    for token_id in order:
        if kept and params.top_p < 1 and sum(weight[i] for i in kept) >= params.top_p * mass:
            break
        kept.append(token_id)
    mass = sum(weight[token_id] for token_id in kept)
    return {token_id: weight[token_id] / mass for token_id in sorted(kept) if weight[token_id] > 0}


def greedy_token(logits: Sequence[float], row: SampleRow) -> int:
    edited = edited_logits(logits, row)
    return edited.index(max(edited))


@record
class PlacedRow(SampleRow):
    """A row, and the position that `step_of` has it drawn for."""

    position: int = 0


def sample_row(params: SamplingParams, *, seed: int = 0, index: int = 0, position: int = 0) -> PlacedRow:
    return PlacedRow(seq_id=0, epoch=0, index=index, seed=seed, params=params, position=position)


def step_of(*sequences: Sequence[PlacedRow]) -> SchedulerOutput:
    """A step in which each sequence wants the given samples, of one position; rows are numbered in order."""
    scheduled = []
    for number, rows in enumerate(sequences):
        samples = tuple(replace(row, seq_id=100 * number + i) for i, row in enumerate(rows))
        scheduled.append(
            ScheduledSequence(
                seq_id=100 * number,
                request_id=f"r{number}",
                epoch=0,
                token_ids=(1,),
                start=rows[0].position - 1 if rows else 0,
                write_start=0,
                block_table=(0,),
                samples=samples,
            )
        )
    return SchedulerOutput(step_id=0, scheduled=tuple(scheduled))
