"""Which tokens may be drawn: min_p, top_k and top_p as one cut through a row of probabilities.

Each of the three keeps a head of the order "by probability, then by lowest id", so what is kept is known
by the probability at the cut and by how many of those equal to it stay. Values alone are sorted, never
ids: numpy's vectorised sort takes 7 ms for 64 x 49,152 where torch's takes 200, and its partition, which
mostly suffices, takes 2. (On a GPU, see `truncate_by_sorting_`.)
"""

from __future__ import annotations

import math

import numpy as np
import torch

_HEAD = 1024


def truncate_(weights: torch.Tensor, min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> None:
    """Zero the weights [R, V] that may not be drawn, in place.

    weights: float32, not negative, each row's sum positive (it need not be 1). In this order, each on
    what the one before left: min_p float32 [R] keeps weights of at least that share of the largest (0:
    all), top_k int64 [R] so many of the largest (0: all), top_p float64 [R] the fewest of the largest
    that reach that share of the mass (1: all). The largest weight always stays.
    """
    if weights.device.type != "cpu":
        truncate_by_sorting_(weights, min_p, top_k, top_p)
        return
    vocab_size = weights.shape[-1]
    floor = weights.amax(-1) * min_p
    top_k = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    cut, num_equals = floor.clone(), torch.full_like(top_k, vocab_size)
    rows = ((top_k < vocab_size) | (top_p < 1)).nonzero().squeeze(-1)
    for width in (min(_HEAD, vocab_size), vocab_size):
        if len(rows):
            part = weights if len(rows) == len(weights) else weights[rows]
            cut[rows], num_equals[rows], is_known = _cuts(part, width, floor[rows], top_k[rows], top_p[rows])
            rows = rows[~is_known]
    weights.mul_(weights >= cut.unsqueeze(-1))
    for row in (num_equals < vocab_size).nonzero().squeeze(-1).tolist():
        equals = (weights[row] == cut[row]).nonzero().squeeze(-1)
        weights[row, equals[int(num_equals[row]) :]] = 0.0


def truncate_by_sorting_(
    weights: torch.Tensor, min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> None:
    """`truncate_` by one sort of values with their ids: more work, but nothing to be looked at on the host.

    So a GPU, which sorts well and waits badly, is not waited for.
    """
    vocab_size = weights.shape[-1]
    ranked, ids = weights.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(vocab_size, device=weights.device)
    floor = ranked[:, 0] * min_p
    top_k = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    num_kept = _num_kept(weights, ranked, place, floor, top_k, top_p)
    weights.scatter_(-1, ids, torch.where(place < num_kept, ranked, 0.0))


def _cuts(
    weights: torch.Tensor, width: int, floor: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the `width` largest of each row tell: (weight at the cut, how many equal to it stay, is known).

    V equals stay where the cut does not part equals. Only if `is_known` are the other two right; it
    always is at full width.
    """
    vocab_size = weights.shape[-1]
    ranked = _largest(weights, width)
    place = torch.arange(width, device=weights.device)
    num_kept = _num_kept(weights, ranked, place, floor, top_k, top_p)
    is_free = (floor == 0) & (top_k == vocab_size)
    is_known = (
        ~_is_allowed(ranked, place, floor, top_k)[:, -1]
        | (is_free & (num_kept.squeeze(-1) < width))
        | (width == vocab_size)
    )

    cut = ranked.gather(-1, num_kept - 1)
    parts_equals = (num_kept < width) & (ranked.gather(-1, num_kept.clamp(max=width - 1)) == cut)
    num_equals = torch.where(parts_equals, num_kept - (ranked > cut).sum(-1, keepdim=True), vocab_size)
    return cut.squeeze(-1), num_equals.squeeze(-1), is_known


def _is_allowed(
    ranked: torch.Tensor, place: torch.Tensor, floor: torch.Tensor, top_k: torch.Tensor
) -> torch.Tensor:
    """bool [R, width]: by min_p and top_k."""
    return (ranked >= floor.unsqueeze(-1)) & (place < top_k.unsqueeze(-1))


def _num_kept(
    weights: torch.Tensor,
    ranked: torch.Tensor,
    place: torch.Tensor,
    floor: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """int64 [R, 1]: how many of the largest stay, as far as `ranked` [R, width], the largest, can tell."""
    is_allowed = _is_allowed(ranked, place, floor, top_k)
    is_free = (floor == 0) & (top_k == weights.shape[-1])
    mass = torch.where(is_allowed, ranked, 0.0).cumsum(-1, dtype=torch.float64)
    bound = torch.where(is_free, mass_of_runs(weights)[:, -1], mass[:, -1]) * top_p
    is_short = mass < torch.where(top_p < 1, bound, torch.inf).unsqueeze(-1)
    return torch.minimum(is_allowed.sum(-1), is_short.sum(-1) + 1).unsqueeze(-1)


def _largest(weights: torch.Tensor, width: int) -> torch.Tensor:
    """The `width` largest of each row, descending."""
    values = weights.numpy()
    if width < values.shape[-1]:
        values = np.partition(values, -width, axis=-1)[:, -width:]
    return torch.from_numpy(np.sort(values, axis=-1)).flip(-1)


def mass_of_runs(weights: torch.Tensor) -> torch.Tensor:
    """float64 [R, V / run]: running sums of weights [R, V] over runs of neighbours, the last one the mass."""
    num_rows, width = weights.shape
    run = run_length(width)
    return weights.view(num_rows, width // run, run).sum(-1).cumsum(-1, dtype=torch.float64)


def run_length(width: int) -> int:
    """Length of the runs into which a row is cut, so that most of a reduction is vectorised."""
    return math.gcd(width, 256)
