"""Each bug is planted in a copy of the source, and the named check catches it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from support.kernel_checks import (
    check_attention,
    check_batch_mates,
    check_chunking,
    check_copies,
    check_rising_scores,
    check_rope,
    check_unseen_slots,
    layout_for,
)
from support.machines import BFLOAT16_PAIRS, has
from support.ops import cpu_cache_dir
from support.planted_codes import CODE_BUGS, CODE_CHECKS
from support.planting import BuggyLibrary, ExpressionBug, plant

from pageturner.kernels import batch_plan, block_copy, gather_attention, tile_attention, torch_ops
from pageturner.kernels.cpu.ops import CpuOps
from pageturner.kernels.interface import AttentionSpec, PagedOps
from pageturner.kernels.torch_ops import TorchOps

Check = Callable[[PagedOps], None]
PLAIN = AttentionSpec(scale=0.3)
WINDOW = AttentionSpec(scale=0.3, sliding_window=21)
WIDE_WINDOW = AttentionSpec(scale=0.3, sliding_window=100)
SINKS = AttentionSpec(scale=0.3, sinks=torch.linspace(-2, 15, 6))


def ragged(ops: PagedOps) -> None:
    check_attention(ops, layout_for(ops, 2, 64, 16), [(1, 53), (7, 7), (1, 3), (20, 53), (1, 16)], 3, PLAIN)


def several_tiles(ops: PagedOps) -> None:
    check_attention(ops, layout_for(ops, 2, 64, 16), [(1, 200), (20, 170)], 3, PLAIN)


def long_context(ops: PagedOps) -> None:
    check_attention(ops, layout_for(ops, 1, 64, 16), [(1, 1100), (2, 1030)], 8, PLAIN)


def window(ops: PagedOps) -> None:
    check_attention(ops, layout_for(ops, 2, 64, 16), [(1, 70), (30, 70)], 3, WINDOW)


def sinks(ops: PagedOps) -> None:
    check_attention(ops, layout_for(ops, 2, 64, 16), [(1, 70), (30, 70)], 3, SINKS)


def chunking(ops: PagedOps) -> None:
    check_chunking(ops, layout_for(ops, 2, 64, 16), 300, [37, 90, 150, 199], 3, WIDE_WINDOW)


def mates(ops: PagedOps) -> None:
    check_batch_mates(ops, layout_for(ops, 2, 64, 16), [(1, 700), (9, 70), (1, 90), (1, 3)], 3, PLAIN)


def rope(ops: PagedOps) -> None:
    check_rope(ops, torch.bfloat16, torch.bfloat16)


def copies(ops: PagedOps) -> None:
    check_copies(ops, [(0, 1), (1, 2), (2, 0), (2, 4), (5, 3)], 6)


def rising(ops: PagedOps) -> None:
    check_rising_scores(ops, torch.float32)


def unseen(ops: PagedOps) -> None:
    check_unseen_slots(ops, torch.bfloat16)


CHECKS = (
    ragged, several_tiles, long_context, window, sinks, chunking, mates, rope, copies, rising, unseen,
)  # fmt: skip

CPP_BUGS: dict[str, tuple[ExpressionBug, Check]] = CODE_BUGS | {
    name: (ExpressionBug(file, right, wrong), check)
    for name, file, right, wrong, check in (
        (
            "a row sees one key too many",
            "attention.h",
            "(key < first) | (key > last)",
            "(key < first) | (key > last + 1)",
            ragged,
        ),
        (
            "a merge does not rescale",
            "attention.h",
            "load(into) * mine",
            "load(into)",
            long_context,
        ),
        (
            "a new anchor does not shrink what came before",
            "attention.h",
            "load(at) * factor",
            "load(at)",
            rising,
        ),
        (
            "the first key of a pair is read though no row sees it",
            "attention_math.h",
            "key < first ? ZEROS : from + key * head_dim",
            "from + key * head_dim",
            unseen,
        ),
        (
            "the second key of a pair is read though no row sees it",
            "attention_math.h",
            "key + 1 < last ? from + (key + 1) * head_dim : ZEROS",
            "from + (key + 1) * head_dim",
            unseen,
        ),
        (
            "values of no sequence are multiplied by zero",
            "attention.h",
            "std::min(step.end, highest + 1)",
            "step.begin + STEP",
            ragged,
        ),
        (
            "the window is one key too wide",
            "attention.h",
            "position - args.sliding_window + 1",
            "position - args.sliding_window",
            window,
        ),
        (
            "a sink does not rescale the rest",
            "attention.h",
            "total * factor + exp(sink - raised)",
            "total + exp(sink - raised)",
            sinks,
        ),
        (
            "a step reads only its first block",
            "attention.h",
            "item.table[position / args.block_size]",
            "item.table[begin / args.block_size]",
            ragged,
        ),
        (
            "splits overlap",
            "attention.h",
            "std::min((split + 1) * SPLIT, item.position + item.query_rows)",
            "item.position + item.query_rows",
            long_context,
        ),
        (
            "heads are dealt to kv heads in turn",
            "attention.h",
            "item.kv_head * group + packed_row % group",
            "packed_row % group * args.num_kv_heads + item.kv_head",
            ragged,
        ),
        (
            "steps begin where the item's window does",
            "attention.h",
            "first_key(item.position) / STEP * STEP",
            "first_key(item.position) / LANES * LANES",
            chunking,
        ),
        ("bf16 is cut, not rounded", "simd.h", "bits + 0x7fff + ((bits >> 16) & 1)", "bits", rope),
        (
            "keys land one lane further",
            "rows.h",
            "offset / LANES * LANES * head_dim + offset % LANES",
            "offset / LANES * LANES * head_dim + (offset + 1) % LANES",
            rope,
        ),
        (
            "heads turn backwards",
            "rows.h",
            "times(low, cos + d) - times(high, sin + d)",
            "times(low, cos + d) + times(high, sin + d)",
            rope,
        ),
    )
}

BUGS_OF_PAIRS = ("the scale of a hidden key is multiplied by zero",)
"""Of no effect where keys are taken one by one: only a pair may hold a key that its row's window hides."""


ATTENTION = "[ar]*.cpp"
"""attention.cpp and rows.cpp: the other operations take four times as long to compile."""


@pytest.fixture(scope="module")
def buggy(tmp_path_factory: pytest.TempPathFactory) -> BuggyLibrary:
    bugs = [bug for bug, _ in CPP_BUGS.values()]
    return BuggyLibrary(bugs, tmp_path_factory.mktemp("sources"), cpu_cache_dir(), pattern=ATTENTION)


@pytest.fixture
def switched(buggy: BuggyLibrary) -> Iterator[BuggyLibrary]:
    yield buggy
    buggy.switch_off()


def test_without_a_bug_every_check_passes(buggy: BuggyLibrary) -> None:
    for check in (*CHECKS, *CODE_CHECKS):
        check(CpuOps(buggy.library))


@pytest.mark.parametrize("name", CPP_BUGS)
def test_bugs_in_cpp_are_caught(switched: BuggyLibrary, name: str) -> None:
    bug, check = CPP_BUGS[name]
    if (bug.file == "attention_math.h" or name in BUGS_OF_PAIRS) and not has(BFLOAT16_PAIRS):
        pytest.skip("this machine multiplies no pairs")
    switched.switch_on(bug)
    with pytest.raises(AssertionError):
        check(CpuOps(switched.library))


TORCH_BUGS: dict[str, tuple[ModuleType, str, str, str, bool, Check]] = {
    # name: module, right, wrong, what torch_ops takes from it, deterministic, check
    "a row sees one key too few": (
        batch_plan, "keys <= last", "keys < last", "plan_by_sequence", False, ragged,
    ),
    "the window is one key too wide": (
        batch_plan, "(spec.sliding_window - 1)", "spec.sliding_window", "plan_by_sequence", False, window,
    ),
    "padding repeats nothing": (
        batch_plan, "torch.minimum(index, end)", "index.clamp(max=0)", "plan_by_sequence", False, ragged,
    ),
    "unowned slots are read": (
        gather_attention, ".masked_fill(hidden, 0)", "", "gather_attention", False, ragged,
    ),
    "a sink has a value": (
        gather_attention, ".softmax(dim=-1)[..., :-1]", "[..., :-1].softmax(dim=-1)", "gather_attention",
        False, sinks,
    ),
    "a tile does not rescale the values": (
        tile_attention, "summed * shrink", "summed", "tile_attention", True, several_tiles,
    ),
    "a tile does not rescale the total": (
        tile_attention, "total * shrink", "total", "tile_attention", True, several_tiles,
    ),
    "tiles begin where the window does": (
        batch_plan, "ROW_TILE, skip=False", "ROW_TILE, skip=True", "plan_by_row_tile", True, chunking,
    ),
    "tiles are as high as their rows": (
        batch_plan, "tiles, ROW_TILE, skip", "tiles, tiles[0].count, skip", "plan_by_row_tile", True, mates,
    ),
    "copies run one after another": (
        block_copy,
        "pool.index_copy_(0, destinations, pool.index_select(0, sources))",
        "[pool[to].copy_(pool[source]) for source, to in pairs]",
        "block_copy", False, copies,
    ),
    "a run goes on where only sources do": (
        block_copy, "(source + 1, destination + 1)", "(source + 1, next_destination)", "block_copy",
        False, copies,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TORCH_BUGS)
def test_bugs_in_torch_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, right, wrong, taken, deterministic, check = TORCH_BUGS[name]
    check(TorchOps(deterministic=deterministic))
    planted = plant(module, right, wrong)
    monkeypatch.setattr(torch_ops, taken, getattr(planted, taken, planted))
    with pytest.raises((AssertionError, RuntimeError)):
        check(TorchOps(deterministic=deterministic))
