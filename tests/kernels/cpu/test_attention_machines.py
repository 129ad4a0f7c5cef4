"""Attention by the code of each kind of machine: against the definition, in any company, and among NaN.

So the operations on rows: the same bits by all that have FMA.
"""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.coded import (
    check_coded_attention,
    check_coded_company,
    check_coded_unseen,
    check_coded_writes,
)
from support.kernel_checks import (
    check_attention,
    check_batch_mates,
    check_chunking,
    check_rising_scores,
    check_unseen_slots,
    layout_for,
)
from support.machines import ATTENTION_MACHINES, BFLOAT16_PAIRS, has
from support.ops import cpu_cache_dir, cpu_library
from support.paged import PagedCase, assert_near, assert_same, make_case

from pageturner.kernels import checks
from pageturner.kernels.cpu import build
from pageturner.kernels.cpu.ops import CpuOps
from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.layout import CODE_DTYPES, KeyOrder, KvLayout
from pageturner.kernels.reference import ReferenceOps

REFERENCE = ReferenceOps(KeyOrder.TILED16)
SPECS = {
    "plain": AttentionSpec(scale=0.2),
    "window": AttentionSpec(scale=0.2, sliding_window=75),
    "chunk, softcap and sinks": AttentionSpec(
        scale=0.5, chunk=50, logit_softcap=3.0, sinks=torch.linspace(-1, 1, 6)
    ),
}
RAGGED = [(1, 130), (20, 77), (7, 7), (1, 3), (1, 1100)]


def math_of(library: ctypes.CDLL, pool: str) -> str:
    name = getattr(library, f"attention_math_{pool}")
    name.restype = ctypes.c_char_p
    return str(name().decode())


@pytest.fixture(scope="module")
def attention_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources without products, which take as long to compile."""
    folder = tmp_path_factory.mktemp("attention")
    for path in (
        *(build.SOURCES / f"{name}.cpp" for name in ("attention", "rows")),
        *build.SOURCES.glob("*.h"),
    ):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(
    scope="module", params=[*list(ATTENTION_MACHINES)[:3], pytest.param("portable", marks=pytest.mark.slow)]
)
def library(request: pytest.FixtureRequest, attention_alone: Path) -> ctypes.CDLL:
    flags, features = ATTENTION_MACHINES[request.param]
    if not has(features):
        pytest.skip(f"no {' '.join(features)} here")
    if flags == build.NATIVE:
        return cpu_library()
    return build.load_library(cpu_cache_dir(), sources=attention_alone, machine=flags)


def wide_case(sequences: list[tuple[int, int]], head_dim: int = 64) -> PagedCase:
    """float32 queries over a pool of bfloat16."""
    layout = KvLayout(2, 2, head_dim, 16, torch.bfloat16, KeyOrder.TILED16)
    case = make_case(sequences, layout=layout, num_heads=6, layer=1)
    return replace(case, query=torch.randn(case.query.shape, generator=torch.Generator().manual_seed(2)))


def test_only_a_pool_of_bfloat16_is_multiplied_in_pairs_and_only_where_the_machine_can(
    library: ctypes.CDLL, request: pytest.FixtureRequest
) -> None:
    assert math_of(library, "float32") == "float32"
    is_native = request.node.callspec.params["library"] == "native"
    assert math_of(library, "bfloat16") == (
        "bfloat16 pairs" if is_native and has(BFLOAT16_PAIRS) else "float32"
    )


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_machine_attends_as_defined(
    library: ctypes.CDLL, dtype: torch.dtype, head_dim: int, spec: AttentionSpec
) -> None:
    ops = CpuOps(library)
    check_attention(ops, layout_for(ops, 2, head_dim, 16, dtype), RAGGED[:4], 3, spec)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_float32_rows_over_a_bfloat16_pool(library: ctypes.CDLL, spec: AttentionSpec) -> None:
    """In float32 with the bits of a widened pool; in pairs, rows and weights are rounded to bfloat16."""
    ops, case = CpuOps(library), wide_case(RAGGED)
    result = ops.attention(case.query, case.kv_layer, case.batch, spec)
    expected = REFERENCE.attention(case.query, case.kv_layer, case.batch, spec)
    assert result.dtype is torch.float32
    if math_of(library, "bfloat16") == "float32":
        assert_near(result, expected)
        assert_same(result, ops.attention(case.query, case.kv_layer.float(), case.batch, spec))
        return
    error = (result - expected).abs()
    assert float(error.max()) < 1.2e-2
    assert float(error.mean()) < 6e-4


@pytest.mark.parametrize("dtype", CODE_DTYPES)
def test_every_machine_reads_and_writes_codes_as_defined(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    ops = CpuOps(library)
    assert math_of(library, checks.dtype_name(dtype)) == math_of(library, "bfloat16")
    for rows in (torch.float32, torch.bfloat16):
        for spec, head_dim in zip(SPECS.values(), (64, 80, 64), strict=True):
            check_coded_attention(ops, layout_for(ops, 2, head_dim, 16, dtype), rows, spec, RAGGED[:4])
        check_coded_writes(ops, layout_for(ops, 2, 80, 16, dtype), rows)
    check_coded_company(ops, layout_for(ops, 2, 64, 16, dtype), SPECS["window"])
    check_coded_unseen(ops, dtype)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_row_has_the_same_bits_in_any_company(library: ctypes.CDLL, spec: AttentionSpec) -> None:
    ops = CpuOps(library)
    layout = layout_for(ops, 2, 64, 16, torch.bfloat16)
    check_chunking(ops, layout, 300, [1, 2, 37, 90, 150, 199, 298, 299], 3, spec)
    check_batch_mates(ops, layout, RAGGED, 3, spec)
    case = wide_case(RAGGED)
    together = ops.attention(case.query, case.kv_layer, case.batch, spec)
    for index, (start, stop) in enumerate(pairwise(case.batch.query_start_loc.tolist())):
        alone = case.sequence(index)
        assert_same(ops.attention(alone.query, alone.kv_layer, alone.batch, spec), together[start:stop])


def test_slots_that_a_row_does_not_see_may_hold_nan(library: ctypes.CDLL) -> None:
    check_unseen_slots(CpuOps(library), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_that_rise_by_any_amount_keep_the_weights_right(
    library: ctypes.CDLL, dtype: torch.dtype
) -> None:
    check_rising_scores(CpuOps(library), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_same_bits_by_all_machines_with_fma(
    library: ctypes.CDLL, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """Of any size: whole vectors of sixteen and of eight, and parts of them."""
    if request.node.callspec.params["library"] == "portable":
        pytest.skip("portable code has no FMA")
    generator = torch.Generator().manual_seed(3)
    ops, native = CpuOps(library), CpuOps(cpu_library())
    for size in (1, 7, 8, 9, 15, 16, 23, 24, 25, 576):
        rows, residual = (torch.randn(5, size, generator=generator).to(dtype) for _ in range(2))
        weight = torch.randn(size, generator=generator).to(dtype)
        for found, wanted in zip(
            ops.rms_norm(rows, weight, 1e-5, residual),
            native.rms_norm(rows, weight, 1e-5, residual),
            strict=True,
        ):
            assert_same(found, wanted)
        gate_up = torch.randn(5, 2 * size, generator=generator).to(dtype) * 20
        assert_same(ops.silu_and_mul(gate_up), native.silu_and_mul(gate_up))
