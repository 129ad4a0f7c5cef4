"""Log-probabilities of tokens under raw logits: of those just chosen, and of known ones that are scored.

All of it row by row in float32, so that a row's values are bitwise independent of the rows beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from pageturner.service.core.outputs import (
    SampledSequence,
    SampledToken,
    SchedulerOutput,
    ScoreRun,
    TokenLogprob,
)
from pageturner.service.errors import NonFiniteLogits
from pageturner.service.model.truncation import run_length
from pageturner.service.model.upload import upload


def token_logprobs(logits: torch.Tensor, token_ids: list[int], counts: list[int]) -> Iterator[SampledToken]:
    """Each row's token with its logprob and that of the `count` likeliest; logits: float32 [R, V]."""
    logprobs = torch.log_softmax(logits, -1)
    (own_ids,) = upload((np.array(token_ids, dtype=np.int64),), logits.device)
    own = logprobs.gather(-1, own_ids.unsqueeze(-1))
    values, ids = largest(logprobs, min(max(counts), logits.shape[-1]))
    # float64 holds the logprobs and the ids exactly, in one transfer.
    table = torch.cat((own.double(), values.double(), ids.double()), dim=-1).tolist()
    width = values.shape[-1]
    for token_id, (logprob, *top), count in zip(token_ids, table, counts, strict=True):
        likeliest = zip(top[:width][:count], top[width:][:count], strict=True)
        yield SampledToken(token_id, logprob, tuple(TokenLogprob(int(i), value) for value, i in likeliest))


def largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, ids) [R, count] of the largest of each row [R, V], by value, then by lowest id."""
    if count <= 1:
        best, ids = row_maxima(values)  # a tenth of what a look for two takes
        return best.unsqueeze(-1)[:, :count], ids.unsqueeze(-1)[:, :count]
    if values.device.type != "cpu":
        # Slower than topk, but nothing has to be looked at on the host.
        ranked, ids = values.sort(stable=True, dim=-1, descending=True)
        return ranked[:, :count], ids[:, :count]
    width = min(count + 1, values.shape[-1])
    top = values.topk(width, sorted=False)
    ids, order = top.indices.sort(-1)
    ranked, rank = top.values.gather(-1, order).sort(stable=True, dim=-1, descending=True)
    ids = ids.gather(-1, rank)
    if 0 < count < width:
        # topk is free to choose among equals at its edge; the lowest ids are found the long way.
        tied = (ranked[:, count - 1] == ranked[:, count]).nonzero().squeeze(-1)
        whole, whole_ids = values[tied].sort(stable=True, dim=-1, descending=True)
        ranked[tied], ids[tied] = whole[:, :width], whole_ids[:, :width]
    return ranked[:, :count], ids[:, :count]


def take_scores(
    logits: torch.Tensor, output: SchedulerOutput, chunk_rows: int
) -> tuple[torch.Tensor, tuple[SampledSequence, ...]]:
    """(logits of the rows that are sampled from, one SampledSequence for each ScoreRun).

    logits: [R, V], the rows of each part in order, those that score before the one that is sampled from.
    chunk_rows: rows whose float32 temporaries are made at a time. A run of which a row holds NaN or +inf, or
    nothing but -inf, yields NonFiniteLogits.
    """
    sampled_rows: list[int] = []
    runs: list[tuple[int, ScoreRun]] = []
    row = 0
    for part in output.scheduled:
        runs += [(row, run) for run in part.scored]
        row += len(part.scored_rows)
        num_sampled = part.num_drafts + 1 if part.samples else 0
        sampled_rows += range(row, row + num_sampled)
        row += num_sampled
    assert row == len(logits), f"{len(logits)} rows of logits for {row}"
    scores = tuple(_score(logits, first, run, chunk_rows) for first, run in runs)
    (kept,) = upload((np.array(sampled_rows, dtype=np.int64),), logits.device)
    return logits[kept], scores


def _score(logits: torch.Tensor, first: int, run: ScoreRun, chunk_rows: int) -> SampledSequence:
    """The run's tokens, by the rows from `first` on."""
    scores: list[SampledToken] = []
    for start in range(0, len(run.token_ids), chunk_rows):
        token_ids = list(run.token_ids[start : start + chunk_rows])
        rows = logits[first + start : first + start + len(token_ids)].float()
        if not torch.isfinite(rows.amax(-1)).all():
            error = NonFiniteLogits("the model produced NaN or infinite logits")
            return SampledSequence(run.seq_id, run.epoch, (), error)
        scores += token_logprobs(rows, token_ids, [run.num_top] * len(token_ids))
    return SampledSequence(run.seq_id, run.epoch, (), scores=tuple(scores))


def row_maxima(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(maximum, its lowest id) of each row of [R, V]; NaN anywhere in a row makes its maximum NaN.

    In two levels where V allows: `amax` over short runs is vectorised, `max` with indices is not
    (64 x 49,152 in float32: 0.1 ms against 0.8; argmax of bfloat16 takes 5).
    """
    num_rows, width = logits.shape
    run = run_length(width)
    if run < 32:
        values, ids = logits.max(-1)
        return values, ids
    runs = logits.view(num_rows, width // run, run)
    values, run_ids = runs.amax(-1).max(-1)
    offsets = runs[torch.arange(num_rows, device=logits.device), run_ids].max(-1).indices
    return values, run_ids * run + offsets
