"""Cached blocks without a reference, in the order in which they are to be evicted.

Scored when they are released and kept in a heap; the entry of a block that left in the meantime is
recognised by its version and skipped.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from pageturner.policies.views import BlockView
from pageturner.service.core.memory.block import Block

_Entry = tuple[float, int, int, int]
"""Score, order of release, block id, version."""


def least_recently_released(view: BlockView) -> float:
    """The score of plain LRU."""
    return view.released_at


def _view(block: Block) -> BlockView:
    release = block.last_release
    return BlockView(
        block.block_id,
        block.depth,
        block.num_hits,
        released_at=release.now,
        tenant=release.tenant,
        priority=release.priority,
        num_chain_blocks=release.num_chain_blocks,
    )


class EvictionQueue:
    """blocks: all of the pool, by id. score: the smallest is first, ties by order of release.

    release_order: of the last block that came in. Its blocks, and they alone, have `in_heap` set.
    """

    def __init__(self, blocks: Sequence[Block], score: Callable[[BlockView], float]) -> None:
        self.release_order = 0
        self._blocks = blocks
        self._score = score
        self._heap: list[_Entry] = []
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def push(self, block: Block) -> None:
        """The block lost its last reference."""
        self.release_order += 1
        self._num_blocks += 1
        block.in_heap = True
        block.heap_version += 1
        entry = (self._score(_view(block)), self.release_order, block.block_id, block.heap_version)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._blocks):
            self._heap = [e for e in self._heap if self._is_current(e)]
            heapq.heapify(self._heap)

    def remove(self, block: Block) -> None:
        """The block is referenced again, or no longer cached."""
        block.in_heap = False
        self._num_blocks -= 1

    def first(self) -> Block:
        """The block of the smallest score; it stays. The queue must not be empty."""
        while not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._blocks[self._heap[0][2]]

    def rescore(self) -> None:
        """Score every block anew, as it was when it was released."""
        self._heap = [
            (self._score(_view(self._blocks[entry[2]])), *entry[1:])
            for entry in self._heap
            if self._is_current(entry)
        ]
        heapq.heapify(self._heap)

    def snapshot(self) -> tuple[tuple[float, int, int], ...]:
        """(score, order of release, block id) of each block, in the order of eviction."""
        return tuple(entry[:3] for entry in sorted(self._heap) if self._is_current(entry))

    def restore(self, entries: Sequence[tuple[float, int, int]], release_order: int) -> None:
        """Fill an empty queue with what another one's `snapshot` said."""
        for score, order, block_id in entries:
            block = self._blocks[block_id]
            block.in_heap = True
            self._num_blocks += 1
            self._heap.append((score, order, block_id, block.heap_version))
        heapq.heapify(self._heap)
        self.release_order = release_order

    def _is_current(self, entry: _Entry) -> bool:
        block = self._blocks[entry[2]]
        return block.in_heap and block.heap_version == entry[3]
