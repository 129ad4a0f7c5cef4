"""Planted bugs of the cache's tiers, for the machine that has them. See `bad_machines`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pageturner.service.core.memory.block import Block
from pageturner.service.core.memory.block_manager import BlockManager
from pageturner.service.core.memory.block_pool import BlockPool
from pageturner.service.core.memory.tiers import CacheTiers
from pageturner.service.core.memory.transfers import TransferEnd
from pageturner.service.core.outputs import BlockCopy
from pageturner.service.core.scheduling.fetching import Fetching
from pageturner.service.core.scheduling.ledger import Ledger
from support.bad_machines import PlantedBug
from support.tier_machine import DiskMachine, HandingOverMachine, TieredMachine


def _spill_without_copy(original: Any) -> Any:
    def end_step(self: CacheTiers) -> Any:
        _, restores = original(self)
        return (), restores

    return end_step


def _restore_without_copy(original: Any) -> Any:
    def restore(self: CacheTiers, copies: Any) -> None:
        self.counts.restored += len(copies)

    return restore


def _found_before_it_is_read(original: Any) -> Any:
    def load(self: CacheTiers, block_hash: bytes) -> int:
        host_block = int(original(self, block_hash))
        self.host.cache_block(host_block, block_hash, depth=0, parent=None)
        return host_block

    return load


def _failed_read_is_cached(original: Any) -> Any:
    def end(self: CacheTiers, ended: TransferEnd, now: float) -> None:
        original(self, TransferEnd(ended.host_block, succeeded=True), now)

    return end


def _failed_spill_stays(original: Any) -> Any:
    def fail_step(self: CacheTiers, copies_out: Iterable[BlockCopy]) -> None:
        return None

    return fail_step


def _host_room_promised_twice(original: Any) -> Any:
    def can_hold(self: Ledger, host_block: int) -> bool:
        return True

    return can_hold


def _one_block_for_all(original: Any) -> Any:
    def restore_block(self: Ledger) -> int:
        return -1 - self._host.num_blocks

    return restore_block


def _restored_in_another_order(original: Any) -> Any:
    def restore(self: BlockManager, sequence: Any, host_blocks: Iterable[int]) -> Any:
        return original(self, sequence, reversed(list(host_blocks)))

    return restore


def _waits_for_ever(original: Any) -> Any:
    def end(self: Fetching, ended: tuple[TransferEnd, ...], now: float) -> None:
        for transfer in ended:
            self._tiers.end(transfer, now)

    return end


def _offer_without_copy(original: Any) -> Any:
    def copy_offered(self: CacheTiers, device: BlockPool) -> None:
        num_copies = len(self._copies_out)
        original(self, device)
        del self._copies_out[num_copies:]

    return copy_offered


def _evictions_are_sent_too(original: Any) -> Any:
    def spill(self: CacheTiers, block: Block) -> None:
        original(self, block)
        if block.block_hash is not None and self.host.lookup(block.block_hash) is not None:
            self._unsaved[block.block_hash] = None

    return spill


# (name, owner, method, mistake, caught by, machine, seed), as `PlantedBug` says.
_PLANTED: tuple[tuple[str, Any, str, Callable[[Any], Any], str, type[TieredMachine], int], ...] = (
    ("spill-without-copy", CacheTiers, "end_step", _spill_without_copy, "tokens", TieredMachine, 0),
    ("restore-without-copy", CacheTiers, "restore", _restore_without_copy, "tokens", TieredMachine, 0),
    (
        "restored-in-another-order",
        BlockManager,
        "restore",
        _restored_in_another_order,
        "tokens",
        TieredMachine,
        0,
    ),
    ("failed-spill-stays", CacheTiers, "fail_step", _failed_spill_stays, "tokens", TieredMachine, 6),
    ("one-block-for-all", Ledger, "restore_block", _one_block_for_all, "OutOfBlocks", TieredMachine, 0),
    (
        "host-room-promised-twice",
        Ledger,
        "can_hold",
        _host_room_promised_twice,
        "OutOfBlocks",
        TieredMachine,
        24,
    ),
    ("found-before-read", CacheTiers, "load", _found_before_it_is_read, "tiers", DiskMachine, 0),
    ("failed-read-cached", CacheTiers, "end", _failed_read_is_cached, "tokens", DiskMachine, 8),
    ("waits-for-ever", Fetching, "end", _waits_for_ever, "fetching", DiskMachine, 0),
    ("offer-without-copy", CacheTiers, "copy_offered", _offer_without_copy, "tokens", HandingOverMachine, 0),
    ("evictions-sent", CacheTiers, "spill", _evictions_are_sent_too, "handed over", HandingOverMachine, 0),
)
TIER_BUGS = tuple(
    PlantedBug(name, owner, method, mistake, caught_by, machine=machine, seed=seed)
    for name, owner, method, mistake, caught_by, machine, seed in _PLANTED
)
