"""Each bug is planted in a copy of the CUDA kernels, and the named check catches it on the emulator."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
import torch
from support import planted_checks as on
from support.ops import cpu_cache_dir
from support.planted_attention_bugs import ATTENTION_BUGS, DECODE, SHARED, UNORDERED_ATTENTION
from support.planted_checks import BF16, FP16
from support.planted_coded_bugs import CODED_BUGS, CODED_VARIANTS, CODED_WATCHED, UNORDERED_CODED
from support.planted_kernels import Bug, BuggyKernels, Edit, bug, copy_kernels
from support.planted_low_rank_bugs import LOW_RANK_BUGS, UNORDERED_LOW_RANK
from support.planted_row_bugs import BLOCK_BUGS, ROW_BUGS, UNORDERED_ROWS

from pageturner.kernels.cuda import variants
from pageturner.kernels.cuda.compiler import SOURCES
from pageturner.kernels.cuda.emulation.build import Builder
from pageturner.kernels.cuda.emulation.runtime import EmulatedRuntime
from pageturner.kernels.cuda.emulation.schedule import SCHEDULES
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.errors import KernelFault, KernelsUnavailable

BUGS = ATTENTION_BUGS | ROW_BUGS | BLOCK_BUGS | CODED_BUGS | LOW_RANK_BUGS
UNORDERED = UNORDERED_ATTENTION | UNORDERED_ROWS | UNORDERED_CODED | UNORDERED_LOW_RANK
"""Bugs of barriers, waits and rings."""

EQUIVALENT = {
    # Floats are added in another order, but in the same one whatever runs first, and beside whatever.
    "partials are added from the last to the first": Bug(
        (
            Edit(
                DECODE,
                "part_sums[part * stride]",
                "part_sums[(item.num_partials - 1 - part) * stride]",
                within="values, part_sums[part * stride]",
            ),
            Edit(
                DECODE,
                "part * stride * kHeadDim",
                "(item.num_partials - 1 - part) * stride * kHeadDim",
            ),
        ),
        on.split,
    ),
    # Whatever their scores are, they are selected away. Values must be zeros: a weight of 0 silences no NaN.
    "decode: keys behind the item's end are copied": bug(
        DECODE,
        "item.end_key - copy_key",
        "kTileKeys",
        on.decode,
        within="keys + offset, item.end_key - copy_key",
    ),
}
"""Edits that change no result."""

APART = {
    # Chunks 8 to 11 of a row change places with some of the next row's.
    "head_dim 96 has the swizzle of 128": bug(SHARED, "kHeadDim % 64 == 0 ? 8 : 4", "8", on.decode_96),
}
"""Of constants, which nothing can switch."""

REFUSED = {
    "nothing is swizzled": (Edit(SHARED, "(chunk ^ turn)", "(chunk ^ 0 * turn)"), 64),
    "head_dim 96 is turned by every row": (Edit(SHARED, "row / 2)", "row)", within="? row : row / 2)"), 96),
}
"""The results would be right and the banks in conflict; the head_dim of which this is not compiled."""

WATCHED = (
    variants.paged_decode(BF16, 64, bounded=False, softcap=False),
    variants.paged_decode(BF16, 256, bounded=False, softcap=False),
    variants.paged_prefill(BF16, 64, bounded=False, softcap=False),
    variants.rms_norm(BF16),
    variants.low_rank_shrink(BF16),
    variants.low_rank_expand(BF16),
    *CODED_WATCHED,
)
VARIANTS = (
    *WATCHED[:-2],
    *CODED_VARIANTS,
    variants.paged_decode(BF16, 96, bounded=False, softcap=False),
    variants.paged_decode(FP16, 64, bounded=True, softcap=True),
    variants.paged_prefill(FP16, 64, bounded=True, softcap=True),
    variants.decode_merge(BF16, 64),
    variants.decode_merge(FP16, 64),
    variants.write_kv(BF16),
    variants.rope_and_write_kv(BF16, torch.float32),
    variants.rope_and_write_kv(BF16, BF16),
    variants.silu_and_mul(BF16),
    variants.copy_blocks(),
    variants.gather_blocks(),
    variants.scatter_blocks(),
)
"""What the checks run, to compile it at once."""


def buggy(folder: Path, *, races: bool) -> BuggyKernels:
    edits = {name: planted.edits for name, planted in (BUGS | UNORDERED | EQUIVALENT).items()}
    return BuggyKernels(edits, folder, cpu_cache_dir(), races=races)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> BuggyKernels:
    """For bugs that need not be watched for races."""
    found = buggy(tmp_path_factory.mktemp("sources"), races=False)
    found.launcher(None).prepare(VARIANTS)
    return found


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> BuggyKernels:
    """In which races are faults."""
    found = buggy(tmp_path_factory.mktemp("watched"), races=True)
    found.launcher(None).prepare(WATCHED)
    return found


def test_without_a_bug_every_check_passes(kernels: BuggyKernels) -> None:
    for check in {planted.check: None for planted in BUGS.values()}:
        check(kernels.launcher(None))


def test_without_a_bug_there_is_no_race_under_any_schedule(watched: BuggyKernels) -> None:
    for check, schedule in product({planted.check: None for planted in UNORDERED.values()}, SCHEDULES):
        check(watched.launcher(None, schedule))


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_caught(kernels: BuggyKernels, name: str) -> None:
    launcher = kernels.launcher(name)
    with pytest.raises((AssertionError, KernelFault)):
        BUGS[name].check(launcher)


@pytest.mark.parametrize("name", UNORDERED)
def test_a_missing_order_is_told_under_every_schedule(watched: BuggyKernels, name: str) -> None:
    for schedule in SCHEDULES:
        launcher = watched.launcher(name, schedule)
        with pytest.raises(KernelFault, match=r"a race with|the copy that began at|divergent"):
            UNORDERED[name].check(launcher)


@pytest.mark.parametrize("name", EQUIVALENT)
def test_what_is_equivalent_is_not_taken_for_a_bug(kernels: BuggyKernels, name: str) -> None:
    results = [EQUIVALENT[name].check(kernels.launcher(name, schedule)) for schedule in SCHEDULES]
    for result in results:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", APART)
def test_a_bug_compiled_apart_is_caught(name: str, tmp_path: Path) -> None:
    planted = APART[name]
    copy_kernels(tmp_path, planted.edits)
    launcher = Launcher(EmulatedRuntime(Builder(cpu_cache_dir(), tmp_path)))
    with pytest.raises((AssertionError, KernelFault)):
        planted.check(launcher)


@pytest.mark.parametrize("name", REFUSED)
def test_a_swizzle_with_conflicts_is_not_compiled(name: str, tmp_path: Path) -> None:
    edit, head_dim = REFUSED[name]
    copy_kernels(tmp_path, [edit])
    variant = variants.paged_decode(BF16, head_dim, bounded=False, softcap=False)
    with pytest.raises(KernelsUnavailable, match="another swizzle is needed for this head_dim"):
        Builder(cpu_cache_dir(), tmp_path).build([variant])


def test_an_edit_without_its_place_is_told_by_bug_and_file(tmp_path: Path) -> None:
    absent, common = Edit("rms_norm.cu", "no such text", ""), Edit("rms_norm.cu", "float", "double")
    buggy = BuggyKernels({"lost": [absent], "vague": [common]}, tmp_path, tmp_path)
    with pytest.raises(LookupError, match=r"lost: 'no such text' occurs 0 times in rms_norm\.cu"):
        buggy.launcher("lost")
    with pytest.raises(LookupError, match=r"vague: 'float' occurs \d+ times in rms_norm\.cu"):
        buggy.launcher("vague")


def test_the_chapter_counts_them() -> None:
    chapter = (SOURCES / "README.md").read_text(encoding="utf-8")
    (count,) = re.findall(r"(\d+) bugs planted in the kernels", chapter)
    assert int(count) == len(BUGS) + len(UNORDERED) + len(APART)
    assert "two edits argued equivalent" in chapter
    assert len(EQUIVALENT) == 2
