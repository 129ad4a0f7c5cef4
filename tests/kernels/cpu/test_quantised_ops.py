"""Quantised products in C++ against their definition: the same bits, for every kind of machine."""

from __future__ import annotations

import ctypes
import math
import shutil
from pathlib import Path

import pytest
import torch
from support.grouped import KINDS, grouped_weight
from support.machines import MACHINES, has
from support.ops import cpu_cache_dir, cpu_library
from support.quantised_checks import CHECKS, MLPS, Check, assert_bits, make_mlp, random_rows

from pageturner.kernels.cpu import build
from pageturner.kernels.cpu.ops import CpuOps
from pageturner.kernels.cpu.quantised_ops import STRUCTURES, CpuQuantisedOps
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.packed import pack
from pageturner.kernels.reference import quantise_rows


@pytest.fixture(scope="module")
def products_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources without the other operations, which take as long to compile."""
    folder = tmp_path_factory.mktemp("products")
    for path in (build.SOURCES / "products.cpp", *build.SOURCES.glob("*.h")):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module", params=MACHINES)
def ops(request: pytest.FixtureRequest, products_alone: Path) -> CpuQuantisedOps:
    flags, features = MACHINES[request.param]
    if not has(features):
        pytest.skip(f"no {' '.join(features)} here")
    return CpuQuantisedOps(build.load_library(cpu_cache_dir(), sources=products_alone, machine=flags))


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_bits_are_those_of_the_definition(ops: CpuQuantisedOps, check: Check) -> None:
    check(ops)


@pytest.mark.parametrize("group", [32, 16])
def test_rows_are_quantised_as_defined(ops: CpuQuantisedOps, group: int) -> None:
    rows = torch.cat((random_rows(20, 96), random_rows(20, 96) * 1e-37, random_rows(20, 96) * 1e37))
    rows[3, 5], rows[4, 50], rows[5, 95] = math.inf, -math.inf, math.nan
    rows[6] = torch.arange(96) / 2  # every second one a tie, where the largest is 127 / 2
    rows[6, ::16] = 63.5
    rows[7] = -rows[6]
    found, wanted = ops.quantise_rows(rows, group), quantise_rows(rows, group)
    assert_bits(found.scales, wanted.scales)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.sums, wanted.sums)


def test_structures_have_the_size_that_cpp_gives_them(ops: CpuQuantisedOps) -> None:
    for name, structure in STRUCTURES.items():
        size = getattr(ops.library, f"sizeof_{name}")
        size.restype = ctypes.c_int64
        assert size() == ctypes.sizeof(structure)


def test_rows_of_other_inputs_and_dtypes_are_refused(ops: CpuQuantisedOps) -> None:
    packed = pack(grouped_weight(KINDS["Q4_1"], 21, 96))
    for rows in (torch.zeros(2, 64), torch.zeros(2, 96, dtype=torch.bfloat16), torch.zeros(96)):
        with pytest.raises(KernelArgumentError, match="rows is"):
            ops.linear(rows, packed)


@pytest.mark.parametrize("case", MLPS.values(), ids=MLPS)
@pytest.mark.parametrize("added", [False, True], ids=["first", "added"])
def test_fused_forms_give_the_bits_of_their_parts(case: tuple[str, str, int, int, int], added: bool) -> None:
    ops, paged = CpuQuantisedOps(cpu_library()), CpuOps(cpu_library())
    up, down, *sizes = case
    mlp = make_mlp(KINDS[up], KINDS[down], *sizes)
    residual = mlp.residual if added else None
    normed, summed = paged.rms_norm(mlp.hidden, mlp.norm, 1e-5, residual)
    gate_up = ops.linear(normed, mlp.gate_up)
    found, left = ops.norm_linear(mlp.hidden, mlp.norm, 1e-5, mlp.gate_up, residual)
    assert_bits(found, gate_up)
    assert_bits(left, summed)
    found, left = ops.norm_mlp(mlp.hidden, mlp.norm, 1e-5, mlp.gate_up, mlp.down, residual)
    assert_bits(found, ops.linear(paged.silu_and_mul(gate_up), mlp.down))
    assert_bits(left, summed)


def test_a_row_that_is_not_finite_goes_through_the_fused_forms() -> None:
    ops = CpuQuantisedOps(cpu_library())
    mlp = make_mlp(KINDS["Q4_1"], KINDS["Q4_1"], 3, 64, 96)
    clean, _ = ops.norm_mlp(mlp.hidden, mlp.norm, 1e-5, mlp.gate_up, mlp.down)
    mlp.hidden[1, 7] = math.inf
    found, _ = ops.norm_mlp(mlp.hidden, mlp.norm, 1e-5, mlp.gate_up, mlp.down)
    assert bool(found[1].isnan().all())
    assert_bits(found[[0, 2]], clean[[0, 2]])


def test_the_named_path_is_the_one_that_runs(request: pytest.FixtureRequest, ops: CpuQuantisedOps) -> None:
    wanted = request.node.callspec.params["ops"].split(" as ")[0]
    assert wanted in ("native", ops.name)
