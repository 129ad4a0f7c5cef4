"""The kernels that move whole blocks, emulated: simultaneous copies, and packing for swaps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import row_kernels
from support.block_checks import BLOCK_SIZES, PAIRS, check_copy_blocks, check_pack_blocks, pool_of
from support.emulation import emulated_launcher
from support.row_checks import far_memory

from pageturner.kernels.cuda.block_moves import Move
from pageturner.kernels.cuda.emulation.schedule import SCHEDULES, Schedule
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.errors import KernelFault


@pytest.fixture(params=SCHEDULES, ids=str)
def launcher(request: pytest.FixtureRequest) -> Launcher:
    schedule: Schedule = request.param
    return emulated_launcher(schedule)


@pytest.fixture
def in_order() -> Launcher:
    return emulated_launcher()


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
def test_copies_are_simultaneous_under_every_schedule(
    launcher: Launcher, pairs: list[tuple[int, int]]
) -> None:
    check_copy_blocks(launcher, pairs, block_bytes=1040)


@pytest.mark.parametrize("block_bytes", BLOCK_SIZES)
def test_copies_of_any_size(in_order: Launcher, block_bytes: int) -> None:
    for pairs in PAIRS.values():
        check_copy_blocks(in_order, pairs, block_bytes)


@settings(max_examples=60)
@given(st.data())
def test_any_copies_are_made_as_if_at_once(data: st.DataObject) -> None:
    destinations = data.draw(st.lists(st.integers(0, 9), unique=True))
    pairs = [(data.draw(st.integers(0, 9)), destination) for destination in destinations]
    most_rows = data.draw(st.integers(1, 4), label="rows of the grid")
    check_copy_blocks(emulated_launcher(), pairs, block_bytes=48, most_rows=most_rows)


def test_more_chains_than_the_grid_has_rows(launcher: Launcher) -> None:
    check_copy_blocks(launcher, PAIRS["apart"], block_bytes=1040, most_rows=2)


@pytest.mark.parametrize("ids", [[4], [7, 0, 3, 9, 8], list(range(10))])
def test_packing_under_every_schedule(launcher: Launcher, ids: list[int]) -> None:
    check_pack_blocks(launcher, ids, block_bytes=1040)


@pytest.mark.parametrize("block_bytes", BLOCK_SIZES)
def test_packing_of_any_size(in_order: Launcher, block_bytes: int) -> None:
    check_pack_blocks(in_order, [7, 0, 3], block_bytes)


def test_more_ids_than_the_grid_has_rows(launcher: Launcher) -> None:
    check_pack_blocks(launcher, [7, 0, 3, 9, 8], block_bytes=1040, most_rows=2)


def test_nothing_to_do(in_order: Launcher) -> None:
    check_copy_blocks(in_order, [], block_bytes=64)
    check_pack_blocks(in_order, [], block_bytes=64)


@pytest.mark.parametrize("move", [(0, 10), (10, 0), (0, -2), (-2, 0)])
def test_a_move_outside_the_pool_stops_the_kernel(in_order: Launcher, move: tuple[int, int]) -> None:
    with pytest.raises(KernelFault, match="bounds check"):
        row_kernels.run_chains(in_order, pool_of(64), [[Move(*move)]])


@pytest.mark.parametrize("block", [-1, 10])
def test_an_id_outside_the_pool_stops_the_kernel(in_order: Launcher, block: int) -> None:
    with pytest.raises(KernelFault, match="bounds check"):
        row_kernels.gather_blocks(in_order, pool_of(64), [block])
    with pytest.raises(KernelFault, match="bounds check"):
        row_kernels.scatter_blocks(in_order, pool_of(64)[:1], pool_of(64), [block])


def test_addresses_of_more_than_32_bits(in_order: Launcher, tmp_path: Path) -> None:
    """The last block of a pool of more than 2^31 columns, of which only the pages that are touched exist."""
    num_blocks, elements = 70_000, 2**18
    pool = far_memory(tmp_path / "pool", num_blocks * elements, torch.int16).view(num_blocks, elements)
    last, first = num_blocks - 1, 0
    pool[last, :] = torch.arange(elements)
    row_kernels.copy_blocks(in_order, pool, [(last, 3)])
    assert torch.equal(pool[3], pool[last])
    packed = row_kernels.gather_blocks(in_order, pool, [first, last])
    assert torch.equal(packed[1], pool[last])
    row_kernels.scatter_blocks(in_order, packed, pool, [last - 1, last - 2])
    assert torch.equal(pool[last - 2], pool[last])
    assert not pool[last - 1].any()
