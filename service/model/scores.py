"""Log-probabilities of known tokens: a step's rows that score, in tiles.

A row is gone through once, whatever it scores: behind a prompt that forks one row scores the first token of
every continuation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from pageturner.service.core.outputs import SampledSequence, SampledToken, SchedulerOutput, ScoreRun
from pageturner.service.errors import NonFiniteLogits
from pageturner.service.model.logprobs import largest, log_masses, row_maxima, told
from pageturner.service.model.upload import Array, upload


def take_scores(
    logits: torch.Tensor, output: SchedulerOutput, tile_rows: int
) -> tuple[torch.Tensor, tuple[SampledSequence, ...]]:
    """(logits of the rows that are sampled from, one SampledSequence for each ScoreRun).

    logits: [R, V], the rows of each part in order, those that score before the one that is sampled from.
    tile_rows: rows whose float32 temporaries are made at a time. A run of which a row holds NaN or +inf, or
    nothing but -inf, yields NonFiniteLogits.
    """
    sampled_rows: list[int] = []
    runs: list[ScoreRun] = []
    rows: list[Array] = []
    row = 0
    for part in output.scheduled:
        for run in part.scored:
            runs.append(run)
            rows.append(np.arange(row, row + len(run.token_ids)))
        row += len(part.scored_rows)
        num_sampled = part.num_drafts + 1 if part.samples else 0
        sampled_rows += range(row, row + num_sampled)
        row += num_sampled
    assert row == len(logits), f"{len(logits)} rows of logits for {row}"
    tokens = chain.from_iterable(_tiles(logits, _Known.of(runs, np.concatenate(rows)), tile_rows))
    scores = tuple(_result(run, [next(tokens) for _ in run.token_ids]) for run in runs)
    (kept,) = upload((np.array(sampled_rows, dtype=np.int64),), logits.device)
    return logits[kept], scores


def _result(run: ScoreRun, tokens: list[SampledToken | None]) -> SampledSequence:
    scores = tuple(token for token in tokens if token is not None)
    if len(scores) == len(tokens):
        return SampledSequence(run.seq_id, run.epoch, (), scores=scores)
    error = NonFiniteLogits("the model produced NaN or infinite logits")
    return SampledSequence(run.seq_id, run.epoch, (), error)


@dataclass(frozen=True, slots=True)
class _Known:
    """Known tokens in the order of the rows that score them, int64 [k] each. num_top: alternatives wanted."""

    rows: Array
    token_ids: Array
    num_top: Array

    @classmethod
    def of(cls, runs: list[ScoreRun], rows: Array) -> _Known:
        """rows: of the runs' tokens, one run after the other."""
        ids = np.fromiter(chain.from_iterable(run.token_ids for run in runs), dtype=np.int64, count=len(rows))
        counts = np.repeat([run.num_top for run in runs], [len(run.token_ids) for run in runs])
        return cls(rows, ids, counts)


def _tiles(logits: torch.Tensor, known: _Known, tile_rows: int) -> Iterator[list[SampledToken | None]]:
    """The known tokens, scored, tile by tile; None where the row's logits are not finite."""
    distinct = np.unique(known.rows)
    for start in range(0, len(distinct), tile_rows):
        rows = distinct[start : start + tile_rows]
        first, end = np.searchsorted(known.rows, (rows[0], rows[-1] + 1))
        tile = _Known(known.rows[first:end], known.token_ids[first:end], known.num_top[first:end])
        yield _tile(_float_rows(logits, rows), np.searchsorted(rows, tile.rows), tile)


def _float_rows(logits: torch.Tensor, rows: Array) -> torch.Tensor:
    """These rows in float32; a view where they are neighbours, and are float32."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return logits[first : last + 1].float()
    (ids,) = upload((rows,), logits.device)
    return logits.index_select(0, ids).float()


def _tile(logits: torch.Tensor, places: Array, known: _Known) -> list[SampledToken | None]:
    """logits: float32 [n, V]. places: which of them scores which known token."""
    best, best_ids = row_maxima(logits)
    is_finite = torch.isfinite(best)
    masses = log_masses(logits, best_ids)
    place, ids = upload((places, known.token_ids), logits.device)
    own = (logits[place, ids] - masses[place]).unsqueeze(-1)
    own = torch.where(is_finite[place].unsqueeze(-1), own, torch.nan)
    counts = known.num_top
    values, top_ids = largest(logits, int(counts.max()))
    values = values - masses.unsqueeze(-1)
    tokens = told(known.token_ids.tolist(), own, values[place], top_ids[place], counts.tolist())
    return [None if token.logprob != token.logprob else token for token in tokens]
