"""A scratch ledger: what would be left if the plan so far were carried out.

The planner books on it and throws it away or carries it out; the pools themselves stay untouched until
the whole plan stands. Reference counts are the pool's plus a planned difference; a block whose planned
count reaches zero becomes available at once, or pending if an unfinished step may still touch it.

Blocks that a swap-in will allocate have no id yet; they are booked under `virtual(host block)`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pageturner.service.core.memory.block_manager import BlockManager
from pageturner.service.core.outputs import NO_BLOCK


def virtual(host_block: int) -> int:
    """The id under which the device copy of a host block is booked before it exists."""
    return NO_BLOCK - 1 - host_block


@dataclass(frozen=True, slots=True)
class LedgerSavepoint:
    """State of a ledger to return to."""

    available: int
    pending: int
    slots: int
    difference: dict[int, int]
    dropped_pending: frozenset[int]
    overwritten: frozenset[int]
    host_available: int
    num_restored: int


class Ledger:
    """available, pending: device blocks. slots: sequences that may start. host_available: blocks of the host
    that no preemption of the plan takes."""

    def __init__(self, manager: BlockManager, slots: int) -> None:
        self._device = manager.device
        self.available = manager.device.num_available
        self.pending = manager.device.num_pending
        self.slots = slots
        self.host_available = manager.host.num_available
        self._host = manager.host
        self._num_restored = 0
        self._difference: dict[int, int] = {}
        self._dropped_pending: set[int] = set()
        self._overwritten: set[int] = set()

    def savepoint(self) -> LedgerSavepoint:
        """What `restore` goes back to."""
        return LedgerSavepoint(
            self.available,
            self.pending,
            self.slots,
            dict(self._difference),
            frozenset(self._dropped_pending),
            frozenset(self._overwritten),
            self.host_available,
            self._num_restored,
        )

    def restore(self, savepoint: LedgerSavepoint) -> None:
        """Forget what was booked since."""
        self.available = savepoint.available
        self.pending = savepoint.pending
        self.slots = savepoint.slots
        self._difference = dict(savepoint.difference)
        self._dropped_pending = set(savepoint.dropped_pending)
        self._overwritten = set(savepoint.overwritten)
        self.host_available = savepoint.host_available
        self._num_restored = savepoint.num_restored

    def references(self, block_id: int) -> int:
        planned = self._difference.get(block_id, 0)
        return planned if block_id < 0 else self._device.ref_count(block_id) + planned

    def take(self, count: int) -> None:
        """Book the allocation of fresh blocks."""
        self.available -= count

    def claim(self, block_id: int) -> None:
        """Book one more reference. The first one on a block uses up its availability."""
        if self.references(block_id) == 0:
            if block_id < 0:
                self.available -= 1
            elif self._is_pending(block_id):
                self.pending -= 1
                self._dropped_pending.discard(block_id)
            else:
                self.available -= 1
        self._difference[block_id] = self._difference.get(block_id, 0) + 1

    def can_hold(self, host_block: int) -> bool:
        """Whether a cached block of the host can be kept there until it is copied; if so, it is booked."""
        if self._host.is_available(host_block):
            if self.host_available <= 0:
                return False
            self.host_available -= 1
        return True

    def restore_block(self) -> int:
        """Book a fresh block, that a block of the host will be copied to; its id until it has one."""
        self._num_restored += 1
        block_id = virtual(self._host.num_blocks + self._num_restored)
        self.claim(block_id)
        return block_id

    def drop(self, block_ids: Iterable[int], *, in_flight: bool) -> None:
        """Book releases. in_flight: the holder is part of a step that has not ended."""
        for block_id in block_ids:
            self._difference[block_id] = self._difference.get(block_id, 0) - 1
            if in_flight:
                self._dropped_pending.add(block_id)
            if self.references(block_id) == 0:
                if self._is_pending(block_id):
                    self.pending += 1
                else:
                    self.available += 1

    def overwrite(self, block_id: int) -> None:
        """Book that its one holder writes to the block: its hash finds it no longer."""
        if block_id >= 0 and self._device.is_cached(block_id):
            self._overwritten.add(block_id)

    def is_overwritten(self, block_id: int) -> bool:
        """Whether a write without a copy is booked; one more reference would call for that copy."""
        return block_id in self._overwritten

    def _is_pending(self, block_id: int) -> bool:
        return block_id in self._dropped_pending or self._device.is_fenced(block_id)
