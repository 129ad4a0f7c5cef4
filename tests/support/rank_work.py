"""What ranks of tests do: functions of a module that processes can import."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from pageturner.service.errors import RankLost
from pageturner.service.model.tensor_parallel.collectives import Collectives
from pageturner.service.model.tensor_parallel.torch_collectives import TorchCollectives
from support.rank_processes import Tell
from support.sharded import TinyModel, in_chunks, in_company

SIZES = (1, 5, 1000, 100_000)
"""Rows of three: a few bytes, and more than a slot of shared memory holds."""
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def part_of(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose sum depends on the order: wide apart, and of either sign."""
    generator = torch.Generator().manual_seed(31 * rank + size)
    spread = 10 ** (6 * torch.rand(size, 3, generator=generator))
    return (torch.randn(size, 3, generator=generator) * spread).to(dtype)


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    """By definition: one addition after the other, in float32, then rounded."""
    wide = torch.float32 if parts[0].is_floating_point() else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


def check_collectives(collectives: Collectives) -> None:
    """What every implementation owes, as one rank sees it."""
    ranks = range(collectives.size)
    for size in SIZES:
        for dtype in DTYPES:
            parts = [part_of(rank, size, dtype) for rank in ranks]
            mine = parts[collectives.rank].clone()
            gathered = collectives.all_gather(mine)
            assert all(map(torch.equal, gathered, parts))
            collectives.all_reduce(mine)
            assert torch.equal(mine, summed(parts))
            for source in ranks:
                told = parts[collectives.rank].clone()
                collectives.broadcast(told, source)
                assert torch.equal(told, parts[source])
    nothing = torch.empty(0, 7)
    collectives.all_reduce(nothing)
    assert [part.shape for part in collectives.all_gather(nothing)] == [(0, 7)] * collectives.size
    # What is strided is read and written where it lies.
    columns = torch.arange(24.0).view(4, 6)[:, 1:4]
    collectives.all_reduce(columns)
    assert torch.equal(columns, torch.arange(24.0).view(4, 6)[:, 1:4] * collectives.size)
    told = torch.full((4, 6), float(collectives.rank))[:, 1:4]
    collectives.broadcast(told, collectives.size - 1)
    assert bool((told == collectives.size - 1).all())


def check_and_lose(collectives: Collectives, tell: Tell) -> None:
    """The work of a rank: checks, says so, and goes on until another is gone."""
    check_collectives(collectives)
    if isinstance(collectives, TorchCollectives):  # again, in two steps where there are more than two ranks
        check_collectives(TorchCollectives(collectives.rank, collectives.size, two_step_bytes=1))
    tell("checked")
    try:
        while True:
            collectives.all_reduce(torch.ones(8))
    except RankLost as lost:
        tell(str(lost))
    collectives.close()
    tell("closed")


def run_in_chunks(model: TinyModel, collectives: Collectives, tell: Tell) -> None:
    """Runs the rank's part of a model and tells the logits."""
    tell(model.run(in_chunks, collectives).tolist())


def run_in_company(
    model: TinyModel, adapters: Mapping[str, Path], collectives: Collectives, tell: Tell
) -> None:
    """Likewise, with adapters."""
    tell(model.run_adapted(in_company, adapters, collectives).tolist())
