"""What a pool knows of its blocks: made, told as a value, and proved to agree with the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from pageturner.policies.views import BlockView, PoolView
from pageturner.service.core.memory.block import Block, BlockState, PoolState
from pageturner.service.core.memory.chains import Chains
from pageturner.service.core.memory.eviction_queue import EvictionQueue, least_recently_released


class PoolRecord:
    """All that a `BlockPool` is; only that class changes it."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        score: Callable[[BlockView], float] = least_recently_released,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evictions = 0
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._evictable = EvictionQueue(self._blocks, score)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._chains = Chains(self._blocks)
        self._pending: set[int] = set()
        self.on_evict: Callable[[Block], None] | None = None
        self._completed_step = 0

    def idle_blocks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The free and the pending ones. What is neither, and in no table, is evictable."""
        return tuple(self._free), tuple(self._pending)

    def full_cached_blocks(self) -> list[tuple[bytes, int]]:
        """(hash, block) of the full blocks that a hash finds: those let go last first, chains from their
        heads."""
        blocks = [b for b in self._blocks if b.block_hash is not None and not b.num_partial_tokens]
        blocks.sort(key=lambda block: (-block.last_release.now, block.depth))
        return [(block.block_hash, block.block_id) for block in blocks if block.block_hash is not None]

    def view(self) -> PoolView:
        """What policies see of the pool."""
        return PoolView(self.num_blocks, len(self._free), len(self._evictable), self.block_size)

    def snapshot(self) -> PoolState:
        """The state of this moment."""
        free = set(self._free)
        return PoolState(
            tuple(self._free),
            tuple(
                BlockState(*(getattr(block, name) for name in BlockState.__slots__))
                for block in self._blocks
                if block.block_id not in free
            ),
            self._evictable.snapshot(),
            self._evictable.release_order,
            self._completed_step,
        )

    def restore(self, state: PoolState) -> None:
        """Bring a pool just made to the state of one of the same size."""
        self._free = list(state.free)
        for part in state.blocks:
            block = self._blocks[part.block_id]
            for name in BlockState.__slots__:
                setattr(block, name, getattr(part, name))
            if block.block_hash is not None:
                self._chains.add(block)
            if block.is_pending:
                self._pending.add(block.block_id)
        self._evictable.restore(state.evictable, state.release_order)
        self._completed_step = state.completed_step

    # --- proof -----------------------------------------------------------------------------

    def check_integrity(self, references: Mapping[int, int] | Counter[int]) -> None:
        """Raise AssertionError, naming the invariant, unless the books agree with `references`.

        references: block id -> table entries that name it, counted by the owners of the tables.
        """
        free = set(self._free)
        assert len(free) == len(self._free), "free-list: a block is free twice"
        for block in self._blocks:
            counted = references.get(block.block_id, 0)
            assert block.ref_count == counted, (
                f"reference-count: block {block.block_id} has {block.ref_count}, tables say {counted}"
            )
            states = [
                block.ref_count > 0,
                block.is_pending,
                block.in_heap,
                block.block_id in free,
            ]
            assert sum(states) == 1, f"partition: block {block.block_id} is in {sum(states)} states"
            if block.in_heap:
                assert block.block_hash is not None, f"evictable: block {block.block_id} has no hash"
            if block.block_id in free:
                assert block.block_hash is None, f"free: block {block.block_id} is still cached"
        self._chains.check_integrity()
        assert len(self._evictable) == sum(b.in_heap for b in self._blocks), "evictable: miscounted"
        assert self._pending == {b.block_id for b in self._blocks if b.is_pending}, "pending: miscounted"
