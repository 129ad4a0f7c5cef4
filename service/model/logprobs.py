"""Log-probabilities under raw logits: what a row's are measured by, its largest, and those of chosen tokens.

All of it row by row in float32, so that a row's values are bitwise independent of the rows beside it. A
token's log-probability takes one pass over its row; the likeliest ones are looked for only where they are
asked for, and then among a few short runs of the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from pageturner.service.core.outputs import SampledToken, TokenLogprob
from pageturner.service.model.truncation import run_length
from pageturner.service.model.upload import upload

_SHORTEST_RUN = 32
"""Shorter ones would be no less work than the row."""


def log_masses(logits: torch.Tensor, best_ids: torch.Tensor) -> torch.Tensor:
    """The logarithm of each row's sum of exp, float32 [R]: logit - log mass = log-probability.

    logits: float32 [R, V]; best_ids: int64 [R], where the rows have their maxima, which are finite. By
    `softmax`, which goes through each row by itself: the likeliest token's share is 1 / sum(exp(x - max)).
    (On a CPU torch's log_softmax takes 1.2 times as long, logsumexp 1.6 times.)
    """
    ids = best_ids.unsqueeze(-1)
    shares = torch.softmax(logits, -1).gather(-1, ids)
    return (logits.gather(-1, ids) - shares.log()).squeeze(-1)


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]
) -> Iterator[SampledToken]:
    """Each row's token with its logprob and that of the `count` likeliest; logits: float32 [R, V], each row's
    maximum finite."""
    _, best_ids = row_maxima(logits)
    masses = log_masses(logits, best_ids).unsqueeze(-1)
    (ids,) = upload((np.array(token_ids, dtype=np.int64),), logits.device)
    own = logits.gather(-1, ids.unsqueeze(-1)) - masses
    values, largest_ids = largest(logits, max(counts))
    yield from told(token_ids, own, values - masses, largest_ids, counts)


def told(
    token_ids: Sequence[int],
    own: torch.Tensor,
    values: torch.Tensor,
    ids: torch.Tensor,
    counts: Sequence[int],
) -> Iterator[SampledToken]:
    """Tokens with their log-probabilities, own: float32 [R, 1], and those of the `count` first of the
    likeliest, values: float32 [R, k], ids: int64 [R, k]."""
    # float64 holds the logprobs and the ids exactly, in one transfer.
    table = torch.cat((own.double(), values.double(), ids.double()), dim=-1).tolist()
    width = values.shape[-1]
    for token_id, (logprob, *top), count in zip(token_ids, table, counts, strict=True):
        likeliest = zip(top[:width][:count], top[width:][:count], strict=True)
        yield SampledToken(token_id, logprob, tuple(TokenLogprob(int(i), value) for value, i in likeliest))


def largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, ids) [R, count] of the largest of each row [R, V], by value, then by lowest id; fewer than
    `count` where V is.

    In two levels where V allows: the `count` largest of a row lie in the `count` runs whose maxima are
    largest, of equals those that come first. (In each of these runs there is an element that is before any
    of another run.)
    """
    count = min(count, values.shape[-1])
    if count == 0:
        return values[:, :0], torch.empty(len(values), 0, dtype=torch.int64, device=values.device)
    if count == 1:
        best, ids = row_maxima(values)
        return best.unsqueeze(-1), ids.unsqueeze(-1)
    num_rows, width = values.shape
    run = run_length(width)
    if run < _SHORTEST_RUN or count * run > width // 2:
        return _largest_of_all(values, count)
    runs = values.view(num_rows, width // run, run)
    run_ids = _largest_of_all(runs.amax(-1), count)[1].sort(-1).values  # ids rise along what is gathered
    found = runs.gather(1, run_ids.unsqueeze(-1).expand(-1, -1, run)).flatten(1)
    ranked, places = _largest_of_all(found, count)
    return ranked, run_ids.gather(-1, places // run) * run + places % run


def _largest_of_all(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `largest`, of all at once."""
    if values.device.type != "cpu":
        # Slower than topk, but nothing has to be looked at on the host.
        ranked, ids = values.sort(stable=True, dim=-1, descending=True)
        return ranked[:, :count], ids[:, :count]
    width = min(count + 1, values.shape[-1])
    top = values.topk(width, sorted=False)
    ids, order = top.indices.sort(-1)
    ranked, rank = top.values.gather(-1, order).sort(stable=True, dim=-1, descending=True)
    ids = ids.gather(-1, rank)
    if count < width:
        # topk is free to choose among equals at its edge; the lowest ids are found the long way.
        tied = (ranked[:, count - 1] == ranked[:, count]).nonzero().squeeze(-1)
        whole, whole_ids = values[tied].sort(stable=True, dim=-1, descending=True)
        ranked[tied], ids[tied] = whole[:, :width], whole_ids[:, :width]
    return ranked[:, :count], ids[:, :count]


def row_maxima(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(maximum, its lowest id) of each row of [R, V]; NaN anywhere in a row makes its maximum NaN.

    In two levels where V allows: `amax` over short runs is vectorised, `max` with indices is not
    (64 x 49,152 in float32: 0.1 ms against 0.8; argmax of bfloat16 takes 5).
    """
    num_rows, width = logits.shape
    run = run_length(width)
    if run < _SHORTEST_RUN:
        values, ids = logits.max(-1)
        return values, ids
    runs = logits.view(num_rows, width // run, run)
    values, run_ids = runs.amax(-1).max(-1)
    offsets = runs[torch.arange(num_rows, device=logits.device), run_ids].max(-1).indices
    return values, run_ids * run + offsets
