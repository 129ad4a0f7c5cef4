"""The kernels that work on rows, emulated: every path of each, against the definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import row_kernels
from support.emulation import emulated_launcher
from support.row_checks import (
    LAYER,
    Heads,
    Rows,
    check_rms_norm,
    check_rope,
    check_rows_of_any_batch,
    check_silu_and_mul,
    check_write_kv,
    far_memory,
    normal,
    paged_rows,
)

from pageturner.kernels.cuda.emulation.schedule import SCHEDULES, Schedule
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.cuda.variants import DTYPES
from pageturner.kernels.errors import KernelFault

BF16, FP16 = DTYPES

SMOL = Heads(num_heads=9, num_kv_heads=3, head_dim=64)
SMALLEST = Heads(num_heads=1, num_kv_heads=1, head_dim=16, num_rows=3)
WIDE = Heads(num_heads=32, num_kv_heads=8, head_dim=128, block_size=32, num_rows=5)  # several parts a row
ODD = Heads(num_heads=5, num_kv_heads=5, head_dim=80, block_size=64, num_rows=70)


@pytest.fixture(params=SCHEDULES, ids=str)
def launcher(request: pytest.FixtureRequest) -> Launcher:
    schedule: Schedule = request.param
    return emulated_launcher(schedule)


@pytest.fixture
def in_order() -> Launcher:
    return emulated_launcher()


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_under_every_schedule(launcher: Launcher, dtype: torch.dtype) -> None:
    check_write_kv(launcher, SMOL, dtype)


@pytest.mark.parametrize("rows", ["contiguous", "merged", "unaligned", "odd"])
@pytest.mark.parametrize("heads", [SMALLEST, WIDE, ODD], ids=["smallest", "wide", "odd"])
def test_write_kv(in_order: Launcher, heads: Heads, rows: Rows) -> None:
    check_write_kv(in_order, heads, BF16, rows)


@pytest.mark.parametrize("table", ["float32", "own"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_under_every_schedule(launcher: Launcher, dtype: torch.dtype, table: str) -> None:
    check_rope(launcher, SMOL, dtype, torch.float32 if table == "float32" else dtype)


@pytest.mark.parametrize("rows", ["contiguous", "merged", "unaligned", "odd"])
@pytest.mark.parametrize("heads", [SMALLEST, WIDE, ODD], ids=["smallest", "wide", "odd"])
def test_rope(in_order: Launcher, heads: Heads, rows: Rows) -> None:
    check_rope(in_order, heads, FP16, torch.float32, rows)


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("size", [64, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_under_every_schedule(
    launcher: Launcher, dtype: torch.dtype, size: int, residual: bool
) -> None:
    check_rms_norm(launcher, (9, 1, size), dtype, residual=residual)


# Around an octet, a warp's row and a pass of a block; 4096 takes several passes.
@pytest.mark.parametrize("size", [1, 7, 8, 9, 248, 256, 257, 264, 1024, 1025, 1032, 4096])
def test_rms_norm_of_any_size(in_order: Launcher, size: int) -> None:
    for residual in (False, True):
        check_rms_norm(in_order, (3, 1, size), BF16, residual=residual)


@pytest.mark.parametrize("rows", ["merged", "padded", "unaligned", "odd", "transposed"])
@pytest.mark.parametrize("shape", [(7, 3, 64), (5, 2, 320), (4, 3, 257), (4, 1, 257)])
def test_rms_norm_of_strided_heads(in_order: Launcher, shape: tuple[int, int, int], rows: Rows) -> None:
    """As the norms of query and key meet them, slices of a merged projection, and with any other strides."""
    check_rms_norm(in_order, shape, FP16, residual=False, rows=rows)
    check_rms_norm(in_order, shape, BF16, residual=True, rows=rows)


@pytest.mark.parametrize("size", [64, 100, 576, 1027])
def test_a_row_is_normed_alike_in_any_batch(in_order: Launcher, size: int) -> None:
    check_rows_of_any_batch(in_order, size, BF16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_under_every_schedule(launcher: Launcher, dtype: torch.dtype) -> None:
    check_silu_and_mul(launcher, 4, 1536, dtype)


@pytest.mark.parametrize("gap", [0, 8, 3])
@pytest.mark.parametrize("size", [1, 7, 8, 100, 1027])
def test_silu_and_mul_of_any_size(in_order: Launcher, size: int, gap: int) -> None:
    check_silu_and_mul(in_order, 3, size, FP16, gap)


def test_no_rows(in_order: Launcher) -> None:
    """An empty batch, as a drained engine may make one, launches nothing."""
    assert row_kernels.silu_and_mul(in_order, torch.empty(0, 16, dtype=BF16)).shape == (0, 8)
    normed, _ = row_kernels.rms_norm(in_order, torch.empty(0, 1, 8, dtype=BF16), torch.ones(8).to(BF16), 1e-5)
    assert normed.shape == (0, 1, 8)


def test_a_slot_outside_the_pool_stops_the_kernel(in_order: Launcher) -> None:
    pool, batch = paged_rows(SMOL, BF16)
    key = normal(SMOL.num_rows, SMOL.num_kv_heads, SMOL.head_dim, dtype=BF16, seed=1)
    slots = batch.slot_mapping.clone()
    slots[5] = pool.shape[0] * SMOL.block_size
    with pytest.raises(KernelFault, match="bounds check"):
        row_kernels.write_kv(in_order, key, key, pool[:, LAYER], slots)


def test_addresses_of_more_than_32_bits(in_order: Launcher, tmp_path: Path) -> None:
    """A pool and rows of more than 4 GiB, of which only the pages that are touched exist."""
    far = 2**31 + 64  # elements between blocks, and between rows
    memory = far_memory(tmp_path / "pool", 2 * far, BF16)
    kv_layer = memory.as_strided((2, 2, 1, 16, 16), (far, 256, 256, 16, 1))
    rows = far_memory(tmp_path / "rows", 2 * far, BF16).as_strided((2, 1, 16), (far, 16, 1))
    rows.copy_(normal(2, 1, 16, dtype=BF16, seed=1))
    slots = torch.tensor([-1, 17])
    row_kernels.write_kv(in_order, rows, rows, kv_layer, slots)
    assert torch.equal(kv_layer[1, :, 0, 1], rows[1].expand(2, 16))
    assert int((kv_layer[0] != 0).sum()) == 0

    ones, zeros = torch.ones(2, 16), torch.zeros(2, 16)
    slots = torch.tensor([-1, 18])
    rotated = row_kernels.rope_and_write_kv(in_order, rows, rows, rows, ones, zeros, kv_layer, slots)
    assert torch.equal(rotated, rows)
    assert torch.equal(kv_layer[1, :, 0, 2], rows[1].expand(2, 16))

    weight = torch.ones(16, dtype=BF16)
    near, _ = row_kernels.rms_norm(in_order, rows.contiguous(), weight, 1e-5)
    apart, _ = row_kernels.rms_norm(in_order, rows, weight, 1e-5)
    assert torch.equal(apart, near)
    near_product = row_kernels.silu_and_mul(in_order, rows.contiguous().flatten(1))
    assert torch.equal(row_kernels.silu_and_mul(in_order, rows.flatten(1)), near_product)
