"""Swaps: few copies however scattered the blocks, and the same bytes whichever way they go."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuda_cases import LAUNCHERS, RUNTIMES
from support.emulation import emulated_launcher
from support.planting import plant

from pageturner.kernels.cuda import swap
from pageturner.kernels.cuda.ops import CudaOps
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.reference import ReferenceOps

Pairs = Sequence[tuple[int, int]]

SCATTERED = [(block, index) for index, block in enumerate((7, 2, 5, 0, 3))]
"""Of the source, to adjacent blocks of the destination."""


def copied(monkeypatch: pytest.MonkeyPatch, module: ModuleType = swap) -> list[int]:
    """The blocks of each copy that is made from now on."""
    lengths: list[int] = []

    def copy(source: torch.Tensor, destination: torch.Tensor) -> None:
        lengths.append(len(source))
        destination.copy_(source)

    monkeypatch.setattr(module, "_copy", copy)
    return lengths


def pool(num_blocks: int, block_bytes: int = 1024, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (num_blocks, 1, block_bytes), generator=generator, dtype=torch.uint8)


def check_swap(launcher: Launcher, source: torch.Tensor, destination: torch.Tensor, pairs: Pairs) -> None:
    expected = destination.clone()
    ReferenceOps().transfer_blocks(source, expected, pairs)
    swap.transfer_blocks(launcher, source, destination, pairs)
    assert torch.equal(destination, expected)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_blocks_are_swapped_as_defined(data: st.DataObject) -> None:
    """Odd sizes of blocks cannot be packed; sources may repeat."""
    block_bytes = data.draw(st.sampled_from((16, 24, 1024, 4112)))
    destinations = data.draw(st.lists(st.integers(0, 11), unique=True))
    pairs = [(data.draw(st.integers(0, 11)), block) for block in destinations]
    check_swap(emulated_launcher(), pool(12, block_bytes), pool(12, block_bytes, seed=1), pairs)


def test_scattered_small_blocks_go_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = copied(monkeypatch)
    check_swap(emulated_launcher(), pool(8), pool(5, seed=1), SCATTERED)
    assert lengths == [5]
    back = [(to_id, from_id) for from_id, to_id in SCATTERED]
    check_swap(emulated_launcher(), pool(5, seed=1), pool(8), back)
    assert lengths == [5, 5]


def test_a_large_swap_is_packed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = copied(monkeypatch)
    monkeypatch.setattr(swap, "STAGING_BYTES", 2048)
    check_swap(emulated_launcher(), pool(8), pool(5, seed=1), SCATTERED)
    assert lengths == [2, 2, 1]


def test_large_blocks_and_runs_are_copied_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = copied(monkeypatch)
    check_swap(emulated_launcher(), pool(8, swap.DIRECT_BYTES), pool(5, swap.DIRECT_BYTES, seed=1), SCATTERED)
    assert lengths == [1] * 5
    lengths.clear()
    check_swap(emulated_launcher(), pool(8), pool(5, seed=1), [(3, 0), (4, 1), (5, 2)])
    assert lengths == [3]


def test_packing_that_saves_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scattered on both sides: packing one leaves the other."""
    lengths = copied(monkeypatch)
    check_swap(emulated_launcher(), pool(8), pool(8, seed=1), [(7, 0), (2, 2), (5, 4)])
    assert lengths == [1] * 3


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_blocks_swapped_out_and_in_are_unchanged(runtime: str) -> None:
    """Out of the device's pool into the host's, and back to other blocks."""
    launcher = LAUNCHERS[runtime]()
    ops, device = CudaOps(launcher), launcher.runtime.device
    mine = pool(8).to(device)
    host = torch.zeros(5, 1, 1024, dtype=torch.uint8, pin_memory=device.type == "cuda")
    back = torch.zeros_like(mine)
    ops.transfer_blocks(mine, host, SCATTERED)
    ops.transfer_blocks(host, back, [(to_id, 7 - from_id) for from_id, to_id in SCATTERED])
    for block, _ in SCATTERED:
        assert torch.equal(back[7 - block].cpu(), mine[block].cpu())
    untouched = sorted({7 - block for block in range(8)} - {7 - block for block, _ in SCATTERED})
    assert not back[untouched].any()


BUGS = {
    "packed in the wrong order": ("key=itemgetter(1 - packed_side)", "key=itemgetter(packed_side)"),
    "the wrong side's ids are packed": (
        "np.array([pair[packed_side] for", "np.array([pair[1 - packed_side] for",
    ),
    "a piece begins at the first pair again": ("pairs[start : start + most]", "pairs[:most]"),
    "a stretch is copied from the start of the buffer": (
        "_copy(staging[index : index + length]", "_copy(staging[:length]",
    ),
}  # fmt: skip


def check_scattered(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """In two pieces of four and two blocks; the first has a gap in the destination."""
    monkeypatch.setattr(swap, "transfer_blocks", module.transfer_blocks)
    monkeypatch.setattr(module, "STAGING_BYTES", 4096)
    lengths = copied(monkeypatch, module)
    scattered = [(7, 0), (2, 1), (5, 2), (0, 5), (3, 6), (4, 7)]
    check_swap(emulated_launcher(), pool(8), pool(8, seed=1), scattered)
    assert lengths == [3, 1, 2]


def test_without_a_bug_the_scattered_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    check_scattered(monkeypatch, swap)


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    planted = plant(swap, *BUGS[name])
    with pytest.raises((AssertionError, RuntimeError)):
        check_scattered(monkeypatch, planted)
