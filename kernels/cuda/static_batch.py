"""A decode step at fixed addresses: what a CUDA graph reads, and the host fills before each replay.

    one buffer   token_ids | positions | slot_mapping | seq_lens | plan, plan, ... | block_tables
                 int64 [n]   int64 [n]   int64 [n]      int32 [n]   a mask each       int32 [n, width]

A graph bakes in addresses, grids and numbers, never what lies in memory. So everything of a step that
differs from the next one lies in this buffer, is planned and packed on the host, and travels in one copy
from pinned memory. (But for the token ids, which are on the device already: who sampled them there need
not show the host.) Grids are as large as the largest plan; thread blocks beyond the plan's counts exit.

A step of fewer sequences than n is padded. A padding row writes nothing (slot -1), and no work item of any
plan names it, so that no key is read for it and its row of the attention output stays whatever it was:
all other operations of a model keep rows apart, and the row is not read in the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pageturner.kernels.cuda.attention_plan import AttentionPlan, AttentionShape
from pageturner.kernels.cuda.attention_planner import AttentionPlanner
from pageturner.kernels.cuda.device_plan import DevicePlan, Partials, make_partials, pack
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.layout import AttentionBatch, HostBatch

PADDING_SLOT = -1
_ALIGNMENT = 16
"""Bytes to which each part of the buffer is aligned: kernels load an item of four words at once."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A typed stretch of the buffer. start: in bytes."""

    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + int(np.prod(self.shape)) * self.dtype.itemsize

    def on_host(self, buffer: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> np.ndarray[Any, Any]:
        return buffer[self.start : self.end].view(self.dtype).reshape(self.shape)

    def on_device(self, buffer: torch.Tensor) -> torch.Tensor:
        dtype = torch.int64 if self.dtype == np.int64 else torch.int32
        return buffer[self.start : self.end].view(dtype).view(self.shape)


class StaticBatch:
    """`size` sequences of one new token each.

    token_ids: int64 [size]. attention: the batch to capture with; its numbers bind nothing.
    plans: one for each of `shapes`, to be used by the operations whenever they are given `attention`.

    planner: of those operations. max_blocks: width of the block tables. partials: of a larger
    static batch, to be shared with it, since one graph runs at a time.
    """

    def __init__(
        self,
        size: int,
        max_blocks: int,
        block_size: int,
        shapes: Sequence[AttentionShape],
        planner: AttentionPlanner,
        device: torch.device,
        partials: Mapping[AttentionShape, Partials] | None = None,
    ) -> None:
        self.size, self.max_blocks = size, max_blocks
        self._planner = planner
        capacities = {
            shape: planner.decode_capacity(size, max_blocks * block_size, shape) for shape in shapes
        }
        if partials is None:
            partials = {
                shape: make_partials(capacity.partials, shape, device)
                for shape, capacity in capacities.items()
            }
        for shape, capacity in capacities.items():
            if len(partials[shape][0]) < capacity.partials:
                raise KernelArgumentError("partials", str(len(partials[shape][0])), f"{capacity.partials}")
        self.partials = partials

        end = 0

        def part(dtype: type[np.integer], *shape: int) -> _Part:
            nonlocal end
            made = _Part(-(-end // _ALIGNMENT) * _ALIGNMENT, np.dtype(dtype), shape)
            end = made.end
            return made

        self._token_ids, self._positions, self._slots = (part(np.int64, size) for _ in range(3))
        self._seq_lens = part(np.int32, size)
        self._plans = {shape: part(np.int32, capacity.words) for shape, capacity in capacities.items()}
        self._tables = part(np.int32, size, max_blocks)

        self._buffer = torch.zeros(end, dtype=torch.uint8, device=device)
        self.plans = {
            shape: DevicePlan(capacity, self._plans[shape].on_device(self._buffer), *partials[shape])
            for shape, capacity in capacities.items()
        }
        self.token_ids = self._token_ids.on_device(self._buffer)
        starts = np.arange(size + 1, dtype=np.int32)
        # Checks of the operations see sequences of one token, in a block that every pool has.
        self._host = HostBatch(
            starts,
            np.ones(size, np.int32),
            np.zeros((size, max_blocks), np.int32),
            np.full(size, PADDING_SLOT, np.int64),
        )
        self.attention = AttentionBatch(
            query_start_loc=torch.from_numpy(starts.copy()).to(device),
            seq_lens=self._seq_lens.on_device(self._buffer),
            block_tables=self._tables.on_device(self._buffer),
            slot_mapping=self._slots.on_device(self._buffer),
            positions=self._positions.on_device(self._buffer),
            max_query_len=1,
            max_seq_len=1,
            host=self._host,
        )
        self.load(self.token_ids[:0], _NO_SEQUENCE)

    def fits(self, batch: AttentionBatch) -> bool:
        """Whether it is a decode step of no more sequences and blocks than there is room for."""
        return (
            batch.max_query_len == 1
            and batch.num_sequences <= self.size
            and batch.block_tables.shape[1] <= self.max_blocks
        )

    def load(self, token_ids: torch.Tensor, host: HostBatch) -> None:
        """Pad, plan, and enqueue the copy on torch's current stream; the host waits for nothing.

        token_ids: int64 [n] on the device, and host, of a decode step that `fits`. Raises
        KernelArgumentError, and changes nothing, if a plan has more items than the graph's grids.
        """
        n, width = len(host.seq_lens), host.block_tables.shape[1]
        plans = {
            shape: pack(self._checked(shape, host), self.plans[shape].capacity, pinned=False)
            for shape in self.plans
        }
        # Rows of tables beyond n are not sent: nothing reads them. Pinned memory that torch does not hand
        # out again before its copy is done.
        end = self._tables.start + n * self.max_blocks * self._tables.dtype.itemsize
        staged = torch.empty(end, dtype=torch.uint8, pin_memory=self._buffer.is_cuda)
        buffer = staged.numpy()
        self._token_ids.on_host(buffer)[:] = 0
        _padded(self._positions.on_host(buffer), host.seq_lens.astype(np.int64) - 1, 0)
        _padded(self._slots.on_host(buffer), host.slot_mapping, PADDING_SLOT)
        _padded(self._seq_lens.on_host(buffer), host.seq_lens, 1)
        for shape, words in plans.items():
            self._plans[shape].on_host(buffer)[:] = words.numpy()
        tables = buffer[self._tables.start :].view(np.int32).reshape(n, self.max_blocks)
        tables[:, :width] = host.block_tables
        tables[:, width:] = 0
        self._buffer[:end].copy_(staged, non_blocking=True)
        self.token_ids[:n].copy_(token_ids)

    def _checked(self, shape: AttentionShape, host: HostBatch) -> AttentionPlan:
        plan = self._planner.plan(host.query_start_loc, host.seq_lens, shape)
        self.plans[shape].capacity.check(plan)
        return plan


_NO_SEQUENCE = HostBatch(
    np.zeros(1, np.int32), np.empty(0, np.int32), np.empty((0, 0), np.int32), np.empty(0, np.int64)
)


def _padded(into: np.ndarray[Any, Any], values: np.ndarray[Any, Any], padding: int) -> None:
    into[: len(values)] = values
    into[len(values) :] = padding
