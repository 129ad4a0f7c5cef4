"""An attention plan where the kernels read it: one tensor, one copy from the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pageturner.kernels.cuda import tiles
from pageturner.kernels.cuda.attention_plan import AttentionPlan, AttentionShape
from pageturner.kernels.errors import KernelArgumentError

_HEADER = 4
"""int32 before the items: how many decode and merge items there are, and padding to 16 bytes."""
_ITEM, _TILE = 4, 2

Partials = tuple[torch.Tensor, torch.Tensor]
"""partial_outputs and partial_sums of a `DevicePlan`."""


@dataclass(frozen=True, slots=True)
class PlanCapacity:
    """How many items of each kind a device plan has room for; the grids are as large."""

    decode_items: int
    merge_items: int
    prefill_tiles: int
    partials: int

    @classmethod
    def of(cls, plan: AttentionPlan) -> PlanCapacity:
        """Just enough."""
        return cls(len(plan.decode_items), len(plan.merge_items), len(plan.prefill_tiles), plan.num_partials)

    @property
    def words(self) -> int:
        """int32 of the whole plan."""
        return _HEADER + _ITEM * (self.decode_items + self.merge_items) + _TILE * self.prefill_tiles

    def check(self, plan: AttentionPlan) -> None:
        """Raises KernelArgumentError for a plan that does not fit."""
        need = PlanCapacity.of(plan)
        for name in ("decode_items", "merge_items", "partials"):
            if (count := getattr(need, name)) > (room := getattr(self, name)):
                raise KernelArgumentError(name, str(count), f"at most the device plan's {room}")
        if need.prefill_tiles != self.prefill_tiles:
            raise KernelArgumentError(
                "prefill_tiles", str(need.prefill_tiles), f"the device plan's {self.prefill_tiles}"
            )


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """words: int32 [capacity.words] on the device,

        num_decode_items, num_merge_items, 0, 0 | decode items | merge items | prefill tiles

    each part as long as the capacity has it; blocks of the grids beyond the two numbers exit. Prefill
    tiles have no such number: there are exactly as many as the capacity says.
    partial_outputs: float32 [capacity.partials, num_kv_heads, 16, head_dim] and partial_sums: float32
    [capacity.partials, num_kv_heads, 16, 2], what split contexts leave for the merge; both may be longer.
    """

    capacity: PlanCapacity
    words: torch.Tensor
    partial_outputs: torch.Tensor
    partial_sums: torch.Tensor

    @classmethod
    def send(cls, plan: AttentionPlan, partials: Partials, device: torch.device) -> DevicePlan:
        """`plan` on the device, in one copy on torch's current stream, with partials of enough room."""
        capacity = PlanCapacity.of(plan)
        packed = pack(plan, capacity, pinned=device.type == "cuda")
        return cls(capacity, packed.to(device, non_blocking=True), *partials)

    @property
    def num_decode_items_address(self) -> int:
        """Device address of an int32: how many decode items there are."""
        return self.words.data_ptr()

    @property
    def num_merge_items_address(self) -> int:
        """Device address of an int32: how many merge items there are."""
        return self.words.data_ptr() + self.words.element_size()

    @property
    def decode_items_address(self) -> int:
        """Device address of the decode items."""
        return self._address(_HEADER)

    @property
    def merge_items_address(self) -> int:
        """Device address of the merge items."""
        return self._address(_HEADER + _ITEM * self.capacity.decode_items)

    @property
    def prefill_tiles_address(self) -> int:
        """Device address of the prefill tiles."""
        return self._address(_HEADER + _ITEM * (self.capacity.decode_items + self.capacity.merge_items))

    def _address(self, word: int) -> int:
        return self.words.data_ptr() + word * self.words.element_size()


def make_partials(count: int, shape: AttentionShape, device: torch.device) -> Partials:
    """Uninitialised, for `count` partials."""
    rows = (count, shape.num_kv_heads, tiles.MMA_ROWS)
    return (
        torch.empty(*rows, shape.head_dim, dtype=torch.float32, device=device),
        torch.empty(*rows, 2, dtype=torch.float32, device=device),
    )


def to_device(words: np.ndarray[tuple[int], np.dtype[np.int32]], device: torch.device) -> torch.Tensor:
    """int32 words, in one copy on torch's current stream that the host does not wait for."""
    staged = torch.empty(len(words), dtype=torch.int32, pin_memory=device.type == "cuda")
    staged.numpy()[:] = words
    return staged.to(device, non_blocking=True)


def pack(plan: AttentionPlan, capacity: PlanCapacity, *, pinned: bool) -> torch.Tensor:
    """The words of `plan` on the host. Parts beyond its items are left as they come: they are not read.

    pinned: in fresh page-locked memory, which torch does not hand out again before the copy is done.
    """
    packed = torch.empty(capacity.words, dtype=torch.int32, pin_memory=pinned)
    words = packed.numpy()
    words[:_HEADER] = len(plan.decode_items), len(plan.merge_items), 0, 0
    start = _HEADER
    for part, room in (
        (plan.decode_items, _ITEM * capacity.decode_items),
        (plan.merge_items, _ITEM * capacity.merge_items),
        (plan.prefill_tiles, _TILE * capacity.prefill_tiles),
    ):
        words[start : start + part.size] = np.ravel(part)
        start += room
    return packed
