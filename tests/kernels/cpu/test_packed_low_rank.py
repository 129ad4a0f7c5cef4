"""Low-rank parts beside quantised weights in C++: the bits of their definition, by the code of every kind of
machine that can run here, near what the factors are in float32."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from support.machines import MACHINES, has
from support.ops import cpu_cache_dir, cpu_library
from support.packed_low_rank_checks import CHECKS, QKV, Check, factors, of_row
from support.planting import BuggyLibrary, ExpressionBug

from pageturner.kernels.cpu import build
from pageturner.kernels.cpu.packed_low_rank import STRUCTURES, CpuPackedLowRankOps
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.low_rank import LowRankOps, ProductSizes
from pageturner.kernels.packed_low_rank import packed_low_rank, rank_group
from pageturner.kernels.reference_low_rank import ReferenceLowRankOps, ReferencePackedLowRankOps


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without the other operations, which take as long to compile."""
    folder = tmp_path_factory.mktemp("low_rank")
    for path in (build.SOURCES / "low_rank.cpp", *build.SOURCES.glob("*.h")):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(
    scope="module",
    params=[
        name if name != "portable" else pytest.param(name, marks=pytest.mark.slow)  # takes long to compile
        for name in MACHINES
    ],
)
def ops(request: pytest.FixtureRequest, sources: Path) -> CpuPackedLowRankOps:
    flags, features = MACHINES[request.param]
    if not has(features):
        pytest.skip(f"no {' '.join(features)} here")
    return CpuPackedLowRankOps(build.load_library(cpu_cache_dir(), sources=sources, machine=flags))


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_bits_are_those_of_the_definition(ops: CpuPackedLowRankOps, check: Check) -> None:
    check(ops)


@pytest.mark.parametrize("rank", [4, 8, 16, 64])
def test_packed_factors_stay_near_their_float_values(rank: int) -> None:
    """Of rows, factors and what is between them each is rounded by at most 1/254 of its group's largest."""
    sizes = ProductSizes((256, 64, 64), 576, 32)
    parts = factors(rank, (rank,) * 3, sizes)
    rows = torch.randn(20, 576, generator=torch.Generator().manual_seed(1))
    found = []
    each: LowRankOps
    for each in (ReferencePackedLowRankOps(), ReferenceLowRankOps()):
        output = torch.zeros(20, sum(sizes.sizes))
        each.add(output, rows, of_row((0,) * 20, 1), [each.prepare(parts, sizes)])
        found.append(output)
    error = (found[0] - found[1]).norm() / found[1].norm()
    assert error < 0.012


def test_groups_of_ranks_fill_up_no_more_than_the_narrowest() -> None:
    for ranks, group in (
        ((4, 0, 1), 8),
        ((8,), 8),
        ((16, 16, 16), 16),
        ((16, 8), 8),
        ((32, 64), 32),
        ((33,), 8),
    ):
        assert rank_group(ranks) == group
    assert rank_group((31,)) == 32
    low_rank = packed_low_rank(factors(1, (9, 0, 24), QKV), QKV)
    assert low_rank is not None
    assert low_rank.ranks == (16, 0, 24)
    assert low_rank.num_bytes < 2 * (40 * 96 + 64 * 16 + 16 * 24)


def test_what_does_not_fit_is_refused() -> None:
    ops = CpuPackedLowRankOps(cpu_library())
    prepared = [ops.prepare(factors(1, (8, 8, 8), QKV), QKV)]
    rows, output = torch.zeros(2, 96), torch.zeros(2, sum(QKV.sizes))
    with pytest.raises(KernelArgumentError, match="multiples of 16"):
        ops.prepare(factors(1, (1,), ProductSizes((40,), 96, 32)), ProductSizes((40,), 96, 32))
    with pytest.raises(KernelArgumentError, match="rows"):
        ops.add(output.bfloat16(), rows.bfloat16(), of_row((0, 0), 1), prepared)
    other = ops.prepare(factors(1, (8, 8, 8), QKV), QKV._replace(group=16))
    with pytest.raises(KernelArgumentError, match=r"groups of \[16, 32\]"):
        ops.add(output, rows, of_row((0, 1), 2), [*prepared, other])
    floats = ReferenceLowRankOps().prepare(factors(1, (8, 8, 8), QKV), QKV)
    with pytest.raises(KernelArgumentError, match=r"low_ranks\[0\] is FloatLowRank"):
        ops.add(output, rows, of_row((0, 0), 1), [floats])


def test_structures_have_the_size_that_cpp_gives_them() -> None:
    for name, structure in STRUCTURES.items():
        size = getattr(cpu_library(), f"sizeof_{name}_args")
        size.restype = ctypes.c_int64
        assert size() == ctypes.sizeof(structure)


BUGS: dict[str, tuple[ExpressionBug, str]] = {
    # name: bug, the check that must see it
    name: (ExpressionBug("packed_low_rank.h", right, wrong), check)
    for name, right, wrong, check in (
        ("every part reads the first one's A x", "low_rank.first_rank(part) / GROUP", "0", "ranks"),
        (
            "every piece of rows is the run's first",
            "std::int64_t{item.piece->begin - run.begin} * groups", "0 * groups", "mixes",
        ),
        (
            "rows that lie apart are read as if they did not",
            "rows[count - 1] - rows[0] != count - 1", "false", "mixes",
        ),
        ("the second tile of a group is the first", "item.tile + i", "item.tile", "ranks"),
        ("a group ends with its tile", "group > LANES ? group / LANES : 1", "1", "ranks"),
        (
            "every block of rows is the first",
            "u + std::int64_t{first} * groups", "u + 0 * first", "mixes",
        ),
        (
            "every tile of B is the first",
            "open_tile(b, index, nullptr)", "open_tile(b, begin, nullptr)", "ranks",
        ),
        (
            "B replaces what it should be added to",
            "load(output + lane) + load(found + i * LANES + lane)", "load(found + i * LANES + lane)", "ranks",
        ),
        ("the ranks of a part in the middle are left out", "(part > 1 ? rank(1) : 0)", "0", "ranks"),
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def buggy(tmp_path_factory: pytest.TempPathFactory) -> BuggyLibrary:
    folder = tmp_path_factory.mktemp("buggy")
    return BuggyLibrary([bug for bug, _ in BUGS.values()], folder, cpu_cache_dir(), pattern="low_rank.cpp")


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(buggy: BuggyLibrary, name: str) -> None:
    bug, check = BUGS[name]
    ops = CpuPackedLowRankOps(buggy.library)
    CHECKS[check](ops)
    buggy.switch_on(bug)
    try:
        with pytest.raises(AssertionError):
            CHECKS[check](ops)
    finally:
        buggy.switch_off()
