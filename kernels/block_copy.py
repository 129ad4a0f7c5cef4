"""Whole-block copies in torch, for pools on any device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from pageturner.kernels import address_checks
from pageturner.kernels.torch_pool import as_bytes


def copy_blocks(pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """`PagedOps.copy_blocks`: gather every source, then scatter."""
    address_checks.check_copy(pool, pairs)
    if pairs:
        pool = as_bytes(pool)
        sources, destinations = torch.tensor(pairs, device=pool.device).unbind(1)
        pool.index_copy_(0, destinations, pool.index_select(0, sources))


def transfer_blocks(
    source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]
) -> None:
    """`PagedOps.transfer_blocks`: one copy for each run of neighbours, on the current stream."""
    address_checks.check_transfer(source, destination, pairs)
    for from_id, to_id, length in runs(pairs):
        destination[to_id : to_id + length].copy_(source[from_id : from_id + length], non_blocking=True)


def runs(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(source, destination, length) of each stretch of pairs in which both ids rise by one."""
    found: list[tuple[int, int, int]] = [(*pairs[0], 1)] if pairs else []
    for (source, destination), (next_source, next_destination) in pairwise(pairs):
        if (next_source, next_destination) == (source + 1, destination + 1):
            found[-1] = (*found[-1][:2], found[-1][2] + 1)
        else:
            found.append((next_source, next_destination, 1))
    return found
