"""Pool and tables under a sliding window: what every layer has passed is given back (see `window`).

Hashes stay chained, and a hit is found from its chain's beginning: all of it has to be cached, though only
what the window sees of it is taken. So blocks that were given back stay cached, evictable, until they are
overwritten. What continues an evicted block can't be found any more: it is no longer cached, in use or not.

A sequence whose rows are scored keeps everything until they are: a row may have to be computed once more.
"""

from __future__ import annotations

from collections.abc import Callable

from pageturner.policies.views import BlockView
from pageturner.service.core.memory.block import Block, Release
from pageturner.service.core.memory.block_manager import BlockManager
from pageturner.service.core.memory.block_pool import BlockPool
from pageturner.service.core.memory.prefix_cache import PrefixHasher
from pageturner.service.core.memory.window import SlidingWindow, num_dropped
from pageturner.service.core.outputs import NO_BLOCK
from pageturner.service.core.request import NOTHING_SCORED, Sequence


class WindowedBlockPool(BlockPool):
    """A pool in which a block may be evictable while another that continues it is in use."""

    def __init__(self, num_blocks: int, block_size: int, score: Callable[[BlockView], float]) -> None:
        super().__init__(num_blocks, block_size, score)
        self._chains.heads_may_go = True

    def renew(self, block_id: int, release: Release) -> None:
        """A lookup went by this block without taking it: if it is evictable, it counts as just released."""
        block = self._blocks[block_id]
        block.num_hits += 1
        if block.in_heap:
            self._evictable.remove(block)
            block.last_release = release
            self._evictable.push(block)

    def _chain_end(self, block: Block) -> Block:
        """The end of what is evictable behind the block. What continues it is in use, and uncached here."""
        while blocks := [later for later in self._chains.continuations(block) if later.in_heap]:
            block = min(blocks, key=lambda b: (b.last_release.now, b.block_id))
        for later in self._chains.continuations(block):
            self.uncache_block(later.block_id)
        return block


class WindowedBlockManager(BlockManager):
    """Tables that begin with NO_BLOCK where the window has passed. now: the scheduler's clock."""

    def __init__(
        self,
        device: WindowedBlockPool,
        host: BlockPool,
        hasher: PrefixHasher | None,
        *,
        reuse_partial_blocks: bool,
        window: SlidingWindow,
        now: Callable[[], float],
    ) -> None:
        super().__init__(device, host, hasher, reuse_partial_blocks=reuse_partial_blocks)
        self._windowed_device = device
        self.window: SlidingWindow = window
        self._now = now

    def num_tail_blocks(self, sequence: Sequence) -> int:
        """None where the beginning is gone: what is computed again behind a cut has to see it."""
        return 0 if num_dropped(self.table(sequence)) else super().num_tail_blocks(sequence)

    def hits(self, sequence: Sequence) -> list[int]:
        """As without a window; a sequence that has no table yet takes the last of them, NO_BLOCK before."""
        found = super().hits(sequence)
        if found and not self.table(sequence) and sequence.next_scored == NOTHING_SCORED:
            position = sequence.next_position(len(found) * self.block_size)
            hidden = min(self.window.num_hidden_blocks(position), len(found) - 1)
            found[:hidden] = [NO_BLOCK] * hidden
        return found

    def claim(self, sequence: Sequence, block_ids: list[int], num_full: int) -> None:
        """As without a window. The blocks that a hit was found by stay cached as if they had been taken."""
        super().claim(sequence, block_ids, num_full)
        release = self._release(sequence, fence=0)
        for index in reversed(range(num_dropped(self.table(sequence)))):
            block_id = self.device.lookup(self.block_hash(sequence, index))
            if block_id is not None:
                self._windowed_device.renew(block_id, release)

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Cache full blocks as without a window, while what is before them is there; then give back what no
        position to come sees. A prompt that is whole has that done for each of the choices that share it."""
        request, num_prompt = sequence.request, sequence.request.num_prompt_tokens
        self._cache_and_drop(sequence)
        if len(request.sequences) == 1 or sequence.num_accepted_tokens < num_prompt:
            return
        for other in request.unfinished:
            if other.num_accepted_tokens < num_prompt <= other.num_kv_tokens:
                other.num_accepted_tokens = num_prompt
                self._cache_and_drop(other)

    def _cache_and_drop(self, sequence: Sequence) -> None:
        """The next to be computed may be the last known one once more. The last full block stays: the one
        behind it is cached by it, and steps load it in place of those that are gone (`model/batch.py`)."""
        dropped, accepted = num_dropped(self.table(sequence)), sequence.num_accepted_tokens
        if not dropped or dropped < sequence.num_cached_blocks:
            super().cache_full_blocks(sequence)
        if sequence.next_scored != NOTHING_SCORED:
            return
        position = sequence.next_position(accepted)
        hidden = min(self.window.num_hidden_blocks(position), accepted // self.block_size - 1)
        if hidden <= dropped:
            return
        table, release = self.table(sequence), self._release(sequence, fence=sequence.request.last_step)
        for block_id in reversed(table[dropped:hidden]):
            self.device.release(block_id, release)
        self.tables[sequence.seq_id] = (NO_BLOCK,) * hidden + table[hidden:]
        self.num_dropped_blocks += hidden - dropped

    def forget_content(self, sequence: Sequence) -> tuple[int, ...]:
        """As without a window, what the sequence gave back included: the fault may be there."""
        dropped = range(num_dropped(self.table(sequence)) if self.caches_prefixes else 0)
        found = [self.device.lookup(self.block_hash(sequence, index)) for index in dropped]
        heads = tuple(block_id for block_id in found if block_id is not None)
        for block_id in heads:
            self.device.uncache_block(block_id)
        return (*heads, *super().forget_content(sequence))

    def _release(self, sequence: Sequence, *, fence: int) -> Release:
        new = sequence.request.new
        return Release(fence, self._now(), new.tenant, new.priority, sequence.num_cached_blocks)
