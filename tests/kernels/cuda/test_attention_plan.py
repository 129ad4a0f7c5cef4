"""The planner: every key once, balance within its bound, nothing but the arguments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plan_checks import PlanCase, check_plan
from support.planting import plant

from pageturner.kernels.cuda import attention_plan, tiles
from pageturner.kernels.cuda.attention_plan import AttentionShape, plan_attention
from pageturner.kernels.cuda.attention_planner import AttentionPlanner
from pageturner.kernels.errors import KernelArgumentError

SHAPE = AttentionShape(num_kv_heads=2, group=4, head_dim=128)


@st.composite
def shapes(draw: st.DrawFn) -> AttentionShape:
    bounds = st.just(0) | st.integers(1, 3000)
    return AttentionShape(
        num_kv_heads=draw(st.integers(1, 8)),
        group=draw(st.integers(1, 16)),
        head_dim=draw(st.sampled_from(tiles.HEAD_DIMS)),
        window=draw(bounds),
        chunk=draw(bounds),
    )


@st.composite
def cases(draw: st.DrawFn) -> PlanCase:
    rows = st.integers(0, 3) | st.integers(0, 200)
    keys = st.integers(0, 40) | st.integers(0, 5000)
    sequences = st.tuples(rows, keys).map(lambda drawn: (drawn[0], sum(drawn)))
    return PlanCase(
        sequences=draw(st.lists(sequences, max_size=8)),
        shape=draw(shapes()),
        num_multiprocessors=draw(st.sampled_from((1, 3, 16, 132))),
        split=draw(st.none() | st.integers(1, 40).map(lambda length: length * tiles.DECODE_KEYS)),
    )


@settings(deadline=None, max_examples=80)
@given(case=cases())
def test_plans_of_any_batch(case: PlanCase) -> None:
    check_plan(plan_attention, case)


@pytest.mark.slow
@settings(deadline=None, max_examples=5000)
@given(case=cases())
def test_plans_of_very_many_batches(case: PlanCase) -> None:
    check_plan(plan_attention, case)


@settings(deadline=None, max_examples=50)
@given(case=cases(), data=st.data())
def test_the_order_of_sequences_changes_only_their_names(case: PlanCase, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(case.sequences))))
    shuffled = replace(case, sequences=[case.sequences[index] for index in order])

    def work(case: PlanCase, names: list[int]) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
        made = case.plan(plan_attention)
        items = sorted(
            (names[sequence], first, end) for sequence, first, end, _ in made.decode_items.tolist()
        )
        return items, sorted((names[sequence], row) for sequence, row in made.prefill_tiles.tolist())

    assert work(case, list(range(len(order)))) == work(shuffled, order)


def test_the_same_arguments_give_the_same_plan_and_stay_as_they_are() -> None:
    starts, lens = np.arange(5, dtype=np.int32), np.array([9, 4000, 4000, 1], np.int32)
    before = starts.copy(), lens.copy()
    first, second = (plan_attention(starts, lens, SHAPE, num_multiprocessors=9) for _ in range(2))
    for name in ("decode_items", "merge_items", "prefill_tiles"):
        assert np.array_equal(getattr(first, name), getattr(second, name))
    assert np.array_equal(starts, before[0])
    assert np.array_equal(lens, before[1])


def test_one_long_context_fills_the_machine() -> None:
    """8 kv heads and 264 places: 33 items each, one for every place but none."""
    made = PlanCase([(1, 32_768)], replace_shape(num_kv_heads=8), 132).plan(plan_attention)
    assert len(made.decode_items) == 33
    lengths = made.decode_items[:, 2] - made.decode_items[:, 1]
    assert lengths.max() - lengths.min() <= tiles.DECODE_KEYS


def test_many_short_contexts_are_not_cut() -> None:
    made = PlanCase([(1, 300)] * 256, SHAPE, 132).plan(plan_attention)
    assert len(made.decode_items) == 256
    assert made.num_partials == len(made.merge_items) == 0


def test_a_long_context_among_short_ones_is_cut() -> None:
    made = PlanCase([(1, 100)] * 100 + [(1, 32_768)], SHAPE, 132).plan(plan_attention)
    assert made.merge_items[:, 0].tolist() == [100]
    assert made.num_partials > 20


def test_a_row_without_keys_is_still_written() -> None:
    """No checked batch has one; a step at fixed addresses may."""
    made = plan_attention(np.array([0, 1], np.int32), np.array([0], np.int32), SHAPE, num_multiprocessors=4)
    assert made.decode_items.tolist() == [[0, 0, 0, -1]]


@pytest.mark.parametrize("split", [0, -16, 8, 24])
def test_a_split_is_whole_tiles(split: int) -> None:
    with pytest.raises(KernelArgumentError, match="split is"):
        PlanCase([(1, 1)], SHAPE, 4, split).plan(plan_attention)


@settings(deadline=None, max_examples=50)
@given(data=st.data(), shape=shapes(), split=st.none() | st.integers(1, 40).map(lambda length: 16 * length))
def test_a_decode_capacity_holds_every_plan(
    data: st.DataObject, shape: AttentionShape, split: int | None
) -> None:
    lens = data.draw(st.lists(st.integers(1, 5000), min_size=1, max_size=8))
    room = data.draw(st.integers(0, 4))
    planner = AttentionPlanner(data.draw(st.sampled_from((1, 16, 132))), split)
    capacity = planner.decode_capacity(len(lens) + room, max(lens) + room, shape)
    made = planner.plan(np.arange(len(lens) + 1, dtype=np.int32), np.array(lens, np.int32), shape)
    capacity.check(made)


def test_a_group_that_no_item_holds_has_no_decode_capacity() -> None:
    with pytest.raises(KernelArgumentError, match="group is 17; needed: at most 16"):
        AttentionPlanner(4).decode_capacity(1, 100, replace_shape(group=17))


def replace_shape(**changes: int) -> AttentionShape:
    return SHAPE._replace(**changes)


# Of 4 rows with a window of 300 keys, the first begins at key 814 and the last at 817, in the next tile.
LONG = PlanCase([(1, 5000), (4, 1117), (5, 777), (2, 16), (0, 9), (60, 2000), (1, 33)], SHAPE, 16)
FIXED = replace(LONG, split=48)
WINDOW = replace(LONG, shape=replace_shape(window=300))
CHUNK = replace(FIXED, shape=replace_shape(chunk=1000))
EVEN = PlanCase([(1, 16_384)] * 10, replace_shape(num_kv_heads=4), 16)
LONELY = PlanCase([(1, 16_384), *[(1, 50)] * 200], replace_shape(num_kv_heads=8), 16)
CASES = (LONG, FIXED, WINDOW, CHUNK, EVEN, LONELY)

BUGS: dict[str, tuple[str, str, PlanCase]] = {
    "the last tile is lost": ("-(-ends // tiles.DECODE_KEYS)", "ends // tiles.DECODE_KEYS", FIXED),
    "pieces overlap": ("(index + 1) * key_tiles[owner] //", "(index + 1.5) * key_tiles[owner] //", FIXED),
    "an item reads past the end": (
        "np.minimum(end * tiles.DECODE_KEYS, ends[owner])", "end * tiles.DECODE_KEYS", LONG,
    ),
    "the window cuts by the last row": ("(ends - counts)[decoded]", "(ends - 1)[decoded]", WINDOW),
    "the window is one key too narrow": ("(shape.window - 1)", "(shape.window - 18)", WINDOW),
    "the window cuts nothing": ("np.maximum(positions - (shape.window - 1), 0)", "0 * positions", WINDOW),
    "a chunk begins a chunk later": ("positions - positions % shape.chunk)", "positions)", CHUNK),
    "partials are shared": ("np.cumsum(partials) - partials", "0 * partials", FIXED),
    "partials run against the keys": (
        "first_partials[owner] + index,", "first_partials[owner] + pieces[owner] - 1 - index,", FIXED,
    ),
    "a merge reads one partial too many": ("merges[:, 2] = pieces", "merges[:, 2] = 1 + pieces", FIXED),
    "a single item leaves a partial": ("is_split = pieces > 1", "is_split = pieces > 0", FIXED),
    "seventeen rows are decoded": ("packed <= tiles.MMA_ROWS", "packed <= 2 * tiles.MMA_ROWS", LONG),
    "sequences without rows get an item": ("(packed > 0) & (packed", "(packed >= 0) & (packed", LONG),
    "the last tile of rows is lost": ("_spread(-(-packed // height))", "_spread(packed // height)", LONG),
    "the lightest rows go first": ("np.argsort(-keys", "np.argsort(keys", LONG),
    "the shortest items go first": ("np.argsort(first - end", "np.argsort(end - first", FIXED),
    "nothing is cut": ("return int(lengths[times.argmin()])", "return longest", LONELY),
    "cut without end": (".clip(least, longest)", ".clip(1, longest)", PlanCase([(1, 500)], SHAPE, 132)),
    "two rounds where the second is nearly empty": (
        "np.minimum(np.ceil(blocks / slots) * longest_pieces, shares + longest_pieces)", "shares", EVEN,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_without_a_bug_every_case_passes(case: PlanCase) -> None:
    check_plan(plan_attention, case)


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_caught(name: str) -> None:
    right, wrong, case = BUGS[name]
    planted = plant(attention_plan, right, wrong)
    with pytest.raises((AssertionError, KeyError)):
        check_plan(planted.plan_attention, case)
