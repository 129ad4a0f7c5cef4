"""A disk of the prefix cache whose transfers end when a test says so, well or badly."""

from __future__ import annotations

from typing import Any

import numpy as np

from pageturner.service.core.memory.transfers import Discard, Load, Save, Transfer, TransferEnd, Withhold

Array = np.ndarray[Any, np.dtype[np.float32]]


class FakeDisk:
    """host_pool: float32 [host blocks, ...], in which transfers read and write when they end.

    stored: content by hash. lies: it tells of blocks that it no longer has. withheld: what it was told not to
    wait for. discarded, unsaved: what it was told to forget, and what it failed to take.
    """

    def __init__(self) -> None:
        self.host_pool: Array = np.zeros(0, dtype=np.float32)
        self.stored: dict[bytes, Array] = {}
        self.lies: set[bytes] = set()
        self.under_way: list[Save | Load] = []
        self.num_loaded = 0
        self.withheld: set[bytes] = set()
        self.discarded: set[bytes] = set()
        self.unsaved: set[bytes] = set()

    def holds(self, block_hash: bytes) -> bool:
        return block_hash in self.stored or block_hash in self.lies

    @property
    def num_blocks(self) -> int:
        return len(self.stored)

    def start(self, transfers: tuple[Transfer, ...]) -> None:
        for transfer in transfers:
            if isinstance(transfer, Discard):
                self.stored.pop(transfer.block_hash, None)
                self.lies.discard(transfer.block_hash)
                self.discarded.add(transfer.block_hash)
            elif isinstance(transfer, Withhold):
                self.withheld.add(transfer.block_hash)
            else:
                self.under_way.append(transfer)

    def end(self, pick: int, *, well: bool = True) -> TransferEnd:
        """End one that is under way. What is read badly leaves junk in its block."""
        transfer = self.under_way.pop(pick % len(self.under_way))
        block, block_hash = transfer.host_block, transfer.block_hash
        if isinstance(transfer, Save):
            if well:
                self.stored[block_hash] = self.host_pool[block].copy()
            else:
                self.unsaved.add(block_hash)
            return TransferEnd(block, well)
        well = well and block_hash in self.stored
        self.host_pool[block] = self.stored[block_hash] if well else np.nan
        self.num_loaded += well
        return TransferEnd(block, well)

    def lose(self, pick: int) -> None:
        """Its files vanish, and it does not know yet."""
        if self.stored:
            block_hash = list(self.stored)[pick % len(self.stored)]
            del self.stored[block_hash]
            self.lies.add(block_hash)
