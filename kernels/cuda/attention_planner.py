"""A machine's planner: `plan_attention` for its number of multiprocessors, and the memory its plans take."""

from __future__ import annotations

from dataclasses import dataclass

from pageturner.kernels.cuda import tiles
from pageturner.kernels.cuda.attention_plan import (
    LEAST_ITEM,
    AttentionPlan,
    AttentionShape,
    Ints,
    block_cost,
    most_decode_items,
    plan_attention,
)
from pageturner.kernels.cuda.device_plan import PlanCapacity
from pageturner.kernels.errors import KernelArgumentError


@dataclass(frozen=True, slots=True)
class AttentionPlanner:
    """split: keys of a decode item whatever else is in the batch, so that a row has the same bits in any
    batch; None: as the machine is filled best."""

    num_multiprocessors: int
    split: int | None = None

    def plan(self, query_start_loc: Ints, seq_lens: Ints, shape: AttentionShape) -> AttentionPlan:
        return plan_attention(
            query_start_loc,
            seq_lens,
            shape,
            num_multiprocessors=self.num_multiprocessors,
            split=self.split,
        )

    def decode_capacity(self, num_sequences: int, max_seq_len: int, shape: AttentionShape) -> PlanCapacity:
        """Room for the plan of up to so many sequences with one row each, of up to so many keys.

        Raises KernelArgumentError for a group whose rows no decode item holds.
        """
        if shape.group > tiles.MMA_ROWS:
            raise KernelArgumentError("group", str(shape.group), f"at most {tiles.MMA_ROWS}")
        most_keys = min(max_seq_len, shape.window or max_seq_len)
        # A window that begins in the middle of a tile touches one more.
        key_tiles = -(-most_keys // tiles.DECODE_KEYS) + bool(shape.window)
        if self.split is None:
            shortest = LEAST_ITEM * block_cost(shape.head_dim)
            most = most_decode_items(num_sequences, shape.num_kv_heads, self.num_multiprocessors)
        else:
            shortest = self.split // tiles.DECODE_KEYS
            most = num_sequences * -(-key_tiles // shortest)
        if key_tiles <= shortest:
            return PlanCapacity(num_sequences, merge_items=0, prefill_tiles=0, partials=0)
        items = min(most, num_sequences * -(-key_tiles // shortest))
        return PlanCapacity(items, merge_items=num_sequences, prefill_tiles=0, partials=items)
