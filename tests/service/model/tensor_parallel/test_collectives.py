"""Sums in one order, gathers in the order of ranks; by torch.distributed between real processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.thread_ranks import on_ranks

from pageturner.service.errors import RankLost
from pageturner.service.model.tensor_parallel.collectives import ALONE, Collectives, add_in_order
from pageturner.service.model.tensor_parallel.torch_collectives import TorchCollectives, open_collectives

SIZES = (1, 5, 1000)
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


def test_one_rank_alone() -> None:
    check_collectives(ALONE)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_as_threads(size: int) -> None:
    on_ranks(size, check_collectives)


@given(
    st.lists(st.lists(st.floats(width=32, allow_nan=False), min_size=4, max_size=4), min_size=1, max_size=6)
)
def test_a_sum_has_one_order(rows: list[list[float]]) -> None:
    parts = [torch.tensor(row) for row in rows]
    total = torch.empty(4)
    add_in_order(parts, total)
    assert torch.equal(total.nan_to_num(), summed(parts).nan_to_num())


def _rank_of_gloo(rank: int, size: int, rendezvous: str, told: Connection) -> None:
    """A process of its own: checks, says so, and then waits for others that may be gone."""
    torch.set_num_threads(1)
    store = dist.FileStore(rendezvous, size)
    collectives = open_collectives(torch.device("cpu"), store, rank, size, timedelta(seconds=60))
    check_collectives(collectives)
    # The same again in two steps where there are more than two ranks.
    check_collectives(TorchCollectives(rank, size, two_step_bytes=1))
    told.send("checked")
    try:
        while True:
            collectives.all_reduce(torch.ones(8))
    except RankLost as lost:
        told.send(str(lost))
    collectives.close()
    told.send("closed")
    told.recv()


@contextmanager
def gloo_ranks(
    size: int, folder: Path
) -> Iterator[list[tuple[multiprocessing.process.BaseProcess, Connection]]]:
    context = multiprocessing.get_context("spawn")
    ranks = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_rank_of_gloo, args=(rank, size, str(folder / "store"), theirs), daemon=True
        )
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        yield ranks
    finally:
        for process, pipe in ranks:
            pipe.close()
            process.kill()
            process.join()


@pytest.mark.skipif(sys.platform != "linux", reason="kills by signal")
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_as_processes_and_the_death_of_one(size: int, tmp_path: Path) -> None:
    with gloo_ranks(size, tmp_path) as ranks:
        for _, pipe in ranks:
            assert pipe.poll(120)
            assert pipe.recv() == "checked"
        *others, (last, _) = ranks
        assert last.pid is not None
        os.kill(last.pid, signal.SIGKILL)
        for rank, (_, pipe) in enumerate(others):
            assert pipe.poll(60)
            assert pipe.recv().startswith(f"rank {rank} has lost another")
            assert pipe.poll(60)
            assert pipe.recv() == "closed"


def test_ranks_that_do_not_come_are_missed(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(RankLost, match="rank 0 of 2 does not meet the others"):
        open_collectives(torch.device("cpu"), store, 0, 2, timedelta(seconds=0.2))
    assert not dist.is_initialized()
