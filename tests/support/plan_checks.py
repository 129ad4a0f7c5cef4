"""What every attention plan must keep, as functions: the properties call them, and so do the planted bugs."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pageturner.kernels.cuda import tiles
from pageturner.kernels.cuda.attention_plan import (
    BLOCKS_PER_MULTIPROCESSOR,
    LEAST_ITEM,
    SHARES,
    AttentionPlan,
    AttentionShape,
    block_cost,
    most_decode_items,
)
from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.reference import first_key

Plan = Callable[..., AttentionPlan]


@dataclass(frozen=True)
class PlanCase:
    """sequences: (rows, seq_len) each."""

    sequences: Sequence[tuple[int, int]]
    shape: AttentionShape
    num_multiprocessors: int
    split: int | None = None

    def plan(self, make: Plan) -> AttentionPlan:
        starts = np.cumsum([0, *(rows for rows, _ in self.sequences)], dtype=np.int32)
        lens = np.array([seq_len for _, seq_len in self.sequences], dtype=np.int32)
        return make(starts, lens, self.shape, num_multiprocessors=self.num_multiprocessors, split=self.split)

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(1.0, sliding_window=self.shape.window or None, chunk=self.shape.chunk or None)

    def is_decoded(self, sequence: int) -> bool:
        return 0 < self.sequences[sequence][0] * self.shape.group <= tiles.MMA_ROWS


def check_plan(make: Plan, case: PlanCase) -> None:
    plan = case.plan(make)
    for array, width in ((plan.decode_items, 4), (plan.merge_items, 4), (plan.prefill_tiles, 2)):
        assert array.dtype == np.int32
        assert array.shape[1] == width
        assert array.flags.c_contiguous
    check_keys_are_covered_once(plan, case)
    check_rows_are_covered_once(plan, case)
    check_partials(plan)
    check_order(plan, case)
    if case.split is None:
        check_balance(plan, case)
        check_size(plan, case)
    else:
        check_batch_mates(make, case)


def check_keys_are_covered_once(plan: AttentionPlan, case: PlanCase) -> None:
    """Whole tiles, from the one that holds the first key any row sees to the last key, and none beyond."""
    for sequence, (rows, seq_len) in enumerate(case.sequences):
        items = sorted(tuple(item[1:3]) for item in plan.decode_items.tolist() if item[0] == sequence)
        if not case.is_decoded(sequence):
            assert not items
            continue
        assert items, "its output must be written"
        covered = np.zeros(seq_len, dtype=int)
        for first, end in items:
            assert 0 <= first < end <= seq_len
            assert first % tiles.DECODE_KEYS == 0
            assert end % tiles.DECODE_KEYS == 0 or end == seq_len
            covered[first:end] += 1
        seen = np.zeros(seq_len, dtype=bool)
        for position in range(seq_len - rows, seq_len):
            seen[first_key(position, case.spec) : position + 1] = True
        assert (covered[seen] == 1).all()
        assert covered.max() == 1
        assert not covered[: seen.argmax() // tiles.DECODE_KEYS * tiles.DECODE_KEYS].any()


def check_rows_are_covered_once(plan: AttentionPlan, case: PlanCase) -> None:
    height = tiles.PREFILL[case.shape.head_dim].rows
    for sequence, (rows, _) in enumerate(case.sequences):
        found = sorted(row for owner, row in plan.prefill_tiles.tolist() if owner == sequence)
        packed = 0 if case.is_decoded(sequence) else rows * case.shape.group
        assert found == list(range(0, packed, height))


def check_partials(plan: AttentionPlan) -> None:
    """A bijection: each partial is left by one item and read by one merge, in the order of its keys."""
    left = {item[3]: item for item in plan.decode_items.tolist() if item[3] != -1}
    assert len(left) == (plan.decode_items[:, 3] != -1).sum()
    assert sorted(left) == list(range(plan.num_partials))
    read: list[int] = []
    for sequence, first, count, unused in plan.merge_items.tolist():
        assert count > 1
        assert unused == 0
        items = [left[partial] for partial in range(first, first + count)]
        assert all(item[0] == sequence for item in items)
        assert items == sorted(items, key=lambda item: item[1])
        read += range(first, first + count)
    assert sorted(read) == list(range(plan.num_partials))
    single = plan.decode_items[plan.decode_items[:, 3] == -1, 0].tolist()
    assert len(set(single)) == len(single)
    assert not set(single) & set(plan.merge_items[:, 0].tolist())


def check_order(plan: AttentionPlan, case: PlanCase) -> None:
    """The longest work comes first."""
    lengths = [-(-(end - first) // tiles.DECODE_KEYS) for _, first, end, _ in plan.decode_items.tolist()]
    assert lengths == sorted(lengths, reverse=True)
    height, keys = tiles.PREFILL[case.shape.head_dim].rows, []
    for sequence, first_row in plan.prefill_tiles.tolist():
        rows, seq_len = case.sequences[sequence]
        last_row = min(first_row + height, rows * case.shape.group) - 1
        first, last = (seq_len - rows + row // case.shape.group for row in (first_row, last_row))
        keys.append(last + 1 - first_key(first, case.spec))
    assert keys == sorted(keys, reverse=True)


def list_schedule(lengths: Sequence[float], slots: int) -> float:
    """When the last of blocks is done that are taken up in order, each as soon as a slot is free."""
    busy = [0.0] * slots
    for length in lengths:
        heapq.heapreplace(busy, busy[0] + length)
    return max(busy)


def check_balance(plan: AttentionPlan, case: PlanCase) -> None:
    """`longest_item`'s bound, with blocks taken up as a grid's are: all items of a kv head, then the next."""
    if not len(plan.decode_items):
        return
    cost, slots = block_cost(case.shape.head_dim), case.num_multiprocessors * BLOCKS_PER_MULTIPROCESSOR
    lengths = -(-(plan.decode_items[:, 2] - plan.decode_items[:, 1]) // tiles.DECODE_KEYS)
    uncut = len(set(plan.decode_items[:, 0].tolist()))
    share = (int(lengths.sum()) + cost * uncut) * case.shape.num_kv_heads / slots
    time = list_schedule([*(lengths + cost)] * case.shape.num_kv_heads, slots)
    time += cost * bool(len(plan.merge_items))
    assert time <= (1 + min(SHARES)) * share + (LEAST_ITEM + 2 + 1 / min(SHARES)) * cost + 2
    if len(cut := lengths[plan.decode_items[:, 3] != -1]):
        assert cut.min() >= LEAST_ITEM * cost // 2, "a cut must bring more than it costs"


def check_size(plan: AttentionPlan, case: PlanCase) -> None:
    most = most_decode_items(len(case.sequences), case.shape.num_kv_heads, case.num_multiprocessors)
    assert plan.num_partials <= len(plan.decode_items) <= most


def check_batch_mates(make: Plan, case: PlanCase) -> None:
    """With a fixed split, a sequence is cut as it is alone, on whatever machine."""
    plan = case.plan(make)
    for sequence, of_sequence in enumerate(case.sequences):
        alone = PlanCase([of_sequence], case.shape, case.num_multiprocessors + 7, case.split).plan(make)
        mine = sorted(tuple(item[1:3]) for item in plan.decode_items.tolist() if item[0] == sequence)
        assert mine == sorted(tuple(item[1:3]) for item in alone.decode_items.tolist())
