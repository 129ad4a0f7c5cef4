"""Sums in one order, gathers in the order of ranks; by torch.distributed between real processes."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.gloo_ranks import gloo_ranks
from support.rank_work import check_and_lose, check_collectives, summed
from support.thread_ranks import on_ranks
from torch.distributed import FileStore, is_initialized  # type: ignore[attr-defined] # torch leaves it out

from pageturner.service.errors import RankLost
from pageturner.service.model.tensor_parallel.collectives import ALONE, add_in_order
from pageturner.service.model.tensor_parallel.torch_collectives import open_collectives


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


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_as_processes_and_the_death_of_one(size: int, tmp_path: Path) -> None:
    with gloo_ranks(size, tmp_path, check_and_lose) as ranks:
        assert [rank.told() for rank in ranks] == ["checked"] * size
        ranks.pop().process.kill()
        for number, rank in enumerate(ranks):
            assert rank.told().startswith(f"rank {number} has lost another")
            assert rank.told() == "closed"


def test_ranks_that_do_not_come_are_missed(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(RankLost, match="rank 0 of 2 does not meet the others"):
        open_collectives(torch.device("cpu"), store, 0, 2, timedelta(seconds=0.2))
    assert not is_initialized()
