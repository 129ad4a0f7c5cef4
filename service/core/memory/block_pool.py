"""One pool of KV blocks: who references them, which may be reused, which are cached.

Every block is in exactly one state:

    live       ref_count > 0
    pending    ref_count = 0, but an unfinished step may still touch it; settles when that step ends
    evictable  ref_count = 0 and cached: its hash finds it until it is overwritten
    free       ref_count = 0 and not cached

Cached blocks form `Chains`: each one is cached only while the one before it is, or a lookup, which goes from
the head, could not reach it. So chains are evicted from their ends.

Only this class changes a reference count or a hash. The free list is a stack: a block freed
last is warm and is reused first. Evictable blocks wait in an `EvictionQueue`. All of that is the pool's
`PoolRecord`, which says it as a value, and proves that it agrees with the tables.
"""

from __future__ import annotations

from pageturner.service.core.memory.block import Block, OutOfBlocks, Release
from pageturner.service.core.memory.pool_record import PoolRecord


class BlockPool(PoolRecord):
    """`num_blocks` blocks of `block_size` tokens.

    score: called when a cached block loses its last reference, and by `rescore`; the smallest score is
    evicted first, ties by order of release. on_evict: told of a cached block before it is overwritten.
    """

    # --- what there is ---------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        """Cached blocks that no table names."""
        return len(self._evictable)

    @property
    def num_pending(self) -> int:
        """Blocks that no table names and an unfinished step may still touch."""
        return len(self._pending)

    @property
    def num_available(self) -> int:
        """Blocks an allocation may take now."""
        return len(self._free) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Blocks that a hash finds, in whatever state."""
        return len(self._chains)

    @property
    def num_live(self) -> int:
        """Blocks that tables name."""
        return self.num_blocks - self.num_available - len(self._pending)

    def ref_count(self, block_id: int) -> int:
        """Table entries that name the block."""
        return self._blocks[block_id].ref_count

    def is_cached(self, block_id: int) -> bool:
        """Whether a lookup finds the block."""
        return self._blocks[block_id].block_hash is not None

    def is_private(self, block_id: int) -> bool:
        """Whether its one holder may write to it: no other table names it, and no hash finds it."""
        block = self._blocks[block_id]
        return block.ref_count == 1 and block.block_hash is None

    def is_available(self, block_id: int) -> bool:
        """Whether the block counts in num_available (it is free or evictable)."""
        block = self._blocks[block_id]
        return block.ref_count == 0 and not block.is_pending

    def is_fenced(self, block_id: int) -> bool:
        """Whether a step that has not ended may still touch the block."""
        return self._blocks[block_id].fence > self._completed_step

    def cached_hashes(self) -> tuple[bytes, ...]:
        """Every hash that finds a block, those cached first first."""
        return self._chains.hashes()

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds the KV of this chain, if it is cached."""
        return self._chains.lookup(block_hash)

    def partial_lengths(self, block_id: int) -> list[int]:
        """Numbers of tokens of the cached partial blocks that continue this one, the largest first."""
        return self._chains.partial_lengths(self._blocks[block_id])

    # --- references ------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with one reference each: free ones first, then the smallest scores.

        Raises OutOfBlocks, and changes nothing, if fewer are available.
        """
        if count > self.num_available:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_available} available")
        taken = []
        for _ in range(count):
            block = self._blocks[self._free.pop() if self._free else self._evict()]
            block.ref_count = 1
            block.num_hits = 0
            block.fence = 0
            taken.append(block.block_id)
        return taken

    def share(self, block_id: int) -> None:
        """Add a reference; revives an evictable or pending block."""
        block = self._blocks[block_id]
        if block.ref_count == 0:
            if block.is_pending:
                self._pending.discard(block_id)
                block.is_pending = False
            else:
                assert block.block_hash is not None, f"block {block_id} is free: it holds nothing to share"
                self._evictable.remove(block)
        block.ref_count += 1

    def count_hit(self, block_id: int) -> None:
        """Note that a prefix lookup was served by this block."""
        self._blocks[block_id].num_hits += 1

    def release(self, block_id: int, release: Release) -> None:
        """Drop one reference; at the last one the block becomes pending, evictable or free."""
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is released more often than it was taken"
        block.ref_count -= 1
        block.fence = max(block.fence, release.fence)
        if block.ref_count:
            return
        block.last_release = release
        if block.fence > self._completed_step:
            block.is_pending = True
            self._pending.add(block_id)
        else:
            self._settle(block)

    def complete(self, step_id: int) -> None:
        """Step `step_id` and all before it have ended: what waited for them settles."""
        self._completed_step = max(self._completed_step, step_id)
        for block_id in sorted(self._pending, reverse=True):
            block = self._blocks[block_id]
            if block.fence <= self._completed_step:
                self._pending.discard(block_id)
                block.is_pending = False
                self._settle(block)

    # --- the cache -------------------------------------------------------------------------

    def cache_block(self, block_id: int, block_hash: bytes, *, depth: int, parent: int | None) -> int | None:
        """Let `block_hash` find this full block. Returns the block that it finds from now on.

        A hash has one block: of a later twin, the one cached before is returned and should be shared in its
        place. None, and nothing is done, if the block before it (parent; None for the first of a chain) is
        not cached, or if this block is cached under another hash.
        """
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is cached while no table names it"
        if block.block_hash is not None:
            return block_id if block.block_hash == block_hash else None
        parent_hash = None if parent is None else self._blocks[parent].block_hash
        if parent is not None and parent_hash is None:
            return None
        cached = self._chains.lookup(block_hash)
        if cached is not None:
            return cached
        block.block_hash, block.parent_hash, block.depth = block_hash, parent_hash, depth
        self._chains.add(block)
        return block_id

    def cache_partial_block(
        self, block_id: int, block_hash: bytes, num_tokens: int, *, depth: int, parent: int
    ) -> None:
        """Let `block_hash` find a block for its first `num_tokens` slots.

        Nothing is done where the block before it is not cached, or a block of the same content is.
        """
        block, parent_hash = self._blocks[block_id], self._blocks[parent].block_hash
        if block.block_hash is None and parent_hash is not None and self.lookup(block_hash) is None:
            block.block_hash, block.parent_hash, block.depth = block_hash, parent_hash, depth
            block.num_partial_tokens = num_tokens
            self._chains.add(block)

    def uncache_block(self, block_id: int) -> None:
        """Forget its hash, before the block is written or because its content is not to be trusted.

        What continues it is not to be found either, and is uncached as well.
        """
        chain = [self._blocks[block_id]]
        for block in chain:
            chain += self._chains.continuations(block)
        for block in reversed(chain):
            if block.block_hash is None:
                continue
            self._chains.remove(block)
            if block.in_heap:
                self._evictable.remove(block)
                self._free.append(block.block_id)

    def rescore(self) -> None:
        """Another policy scores: ask it about every evictable block, as it was when it was released.

        Ties still fall to the order of release.
        """
        self._evictable.rescore()

    # --- inside ----------------------------------------------------------------------------

    def _settle(self, block: Block) -> None:
        if block.block_hash is None:
            self._free.append(block.block_id)
            return
        self._evictable.push(block)

    def _evict(self) -> int:
        """The block of the smallest score, or else the end of a chain that continues it."""
        block = self._chain_end(self._evictable.first())
        if self.on_evict is not None:
            self.on_evict(block)
        # The hash is dropped before the block is written anew: no hash may find another prompt's KV.
        self._chains.remove(block)
        self._evictable.remove(block)
        self.num_evictions += 1
        return block.block_id

    def _chain_end(self, block: Block) -> Block:
        """The block, if nothing cached continues it, else the end of the continuation released first."""
        while blocks := self._chains.continuations(block):
            block = min(blocks, key=lambda b: (b.last_release.now, b.block_id))
        assert block.in_heap, f"chain: block {block.block_id} is in use and the one before it is evictable"
        return block
