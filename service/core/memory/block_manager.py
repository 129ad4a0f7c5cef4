"""Block tables: which blocks hold the KV of which sequence, on the device and on the host.

Only this class changes a table. It plans nothing: callers have made sure, on a scratch ledger, that what
they ask for fits; an operation that does not fit raises OutOfBlocks and changes nothing.

    fork           shares every block, a partial one too
    claim          shares what is cached, at the end a partial block if one is
    prepare_write  the first writer of a shared block copies it, the last one writes in place
    swap_out       each distinct block of a request once; sharing inside the request survives in host counts
    truncate       gives up blocks at the end of a table
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from pageturner.service.core.memory.block import Release
from pageturner.service.core.memory.block_pool import BlockPool
from pageturner.service.core.memory.prefix_cache import PrefixHasher
from pageturner.service.core.memory.tiers import CacheTiers
from pageturner.service.core.memory.window import SlidingWindow, held, num_dropped
from pageturner.service.core.outputs import NO_BLOCK, BlockCopy
from pageturner.service.core.request import Request, Sequence


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` slots."""
    return -(-num_tokens // block_size)


def _with_block(table: tuple[int, ...], index: int, block_id: int) -> tuple[int, ...]:
    """The table with another block at `index`."""
    return (*table[:index], block_id, *table[index + 1 :])


class BlockManager:
    """Tables over a device pool and a host pool of equal block size.

    hasher: names blocks for the prefix cache; None switches the cache off. reuse_partial_blocks: whether the
    last block of an ended sequence is cached though it is not full. tables: device blocks by sequence, in
    order. A table is never changed, only replaced: steps in flight keep the one that they were given.
    window: what of a table may be given back while its sequence goes on (`windowed`): it begins with NO_BLOCK
    then, and num_dropped_blocks counts those.
    noted_hashes: for a recorder that takes them, the hashes of partial blocks that were asked for, by
    sequence and number of its tokens; None without one. tiers: where cached blocks live on that the device
    evicts; None for nowhere.
    """

    def __init__(
        self,
        device: BlockPool,
        host: BlockPool,
        hasher: PrefixHasher | None,
        *,
        reuse_partial_blocks: bool = False,
        tiers: CacheTiers | None = None,
    ) -> None:
        self.device = device
        self.host = host
        self.tiers = tiers
        if tiers is not None:
            device.on_evict = tiers.spill
        self.block_size = device.block_size
        self.window: SlidingWindow | None = None
        self.num_dropped_blocks = 0
        self.noted_hashes: dict[tuple[int, int], bytes] | None = None
        self._hasher = hasher
        self._reuses_partial_blocks = reuse_partial_blocks and hasher is not None
        self.tables: dict[int, tuple[int, ...]] = {}
        self._host_tables: dict[int, tuple[int, ...]] = {}

    # --- what a sequence holds -------------------------------------------------------------

    def table(self, sequence: Sequence) -> tuple[int, ...]:
        """The sequence's device blocks, in order; none if it has no table."""
        return self.tables.get(sequence.seq_id, ())

    def num_blocks(self, sequence: Sequence) -> int:
        """How many device blocks the sequence's table names."""
        return len(held(self.tables.get(sequence.seq_id, ())))

    def cached_hashes(self) -> tuple[bytes, ...]:
        """Hashes by which a request that comes now would find KV, on the device first, then in the host."""
        cached = self.device.cached_hashes()
        return cached if self.tiers is None else (*cached, *self.host.cached_hashes())

    def holds_device_blocks(self, request: Request) -> bool:
        return any(sequence.seq_id in self.tables for sequence in request.sequences)

    def references(self, request: Request) -> Counter[int]:
        """Device blocks of all sequences of a request, and how many of its tables name each."""
        counter: Counter[int] = Counter()
        for sequence in request.sequences:
            counter.update(held(self.tables.get(sequence.seq_id, ())))
        return counter

    def host_table(self, sequence: Sequence) -> tuple[int, ...]:
        return self._host_tables.get(sequence.seq_id, ())

    def num_tail_blocks(self, sequence: Sequence) -> int:
        """Exclusive blocks at the end of the table, the ones a tail reclaim can free."""
        count = 0
        for block_id in reversed(self.tables.get(sequence.seq_id, ())):
            if self.device.ref_count(block_id) > 1:
                break
            count += 1
        return count

    def num_wasted_slots(self, sequences: Iterable[Sequence]) -> int:
        """Allocated device slots that hold no token; a shared block counts once, by its fullest holder."""
        filled: dict[int, int] = {}
        for sequence in sequences:
            table = self.tables.get(sequence.seq_id, ())
            for index, block_id in enumerate(held(table), num_dropped(table)):
                used = min(self.block_size, max(0, sequence.num_kv_tokens - index * self.block_size))
                filled[block_id] = max(filled.get(block_id, 0), used)
        return sum(self.block_size - used for used in filled.values())

    # --- prefix cache ----------------------------------------------------------------------

    @property
    def hasher(self) -> PrefixHasher | None:
        return self._hasher

    @property
    def caches_prefixes(self) -> bool:
        return self._hasher is not None

    def root_hash(self, *, adapter: str, salt: str, tenant: str = "") -> bytes:
        if self._hasher is None:
            return b""
        return self._hasher.root(adapter=adapter, salt=salt, tenant=tenant)

    def block_hash(self, sequence: Sequence, index: int) -> bytes:
        """Hash of the index-th block of the sequence, all of whose tokens are known."""
        assert self._hasher is not None
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            start = len(hashes) * self.block_size
            parent = hashes[-1] if hashes else sequence.request.root_hash
            hashes.append(self._hasher.extend(parent, sequence.tokens[start : start + self.block_size]))
        return hashes[index]

    def hits(self, sequence: Sequence) -> list[int]:
        """Cached blocks that serve a sequence that does not run: they continue its table, or, while it is
        swapped out, equal its first host blocks."""
        if self._hasher is None or sequence.request.new.bypass_prefix_cache:
            return []
        first, end = len(self.tables.get(sequence.seq_id, ())), sequence.num_known_tokens
        if sequence.seq_id in self._host_tables:
            end = sequence.num_kv_tokens
        elif sequence.num_kv_tokens != first * self.block_size:
            return []
        elif first and not self.device.is_cached(self.tables[sequence.seq_id][-1]):
            return []  # what continues an uncached block is out of reach
        found = []
        for index in range(first, end // self.block_size):
            block_id = self.device.lookup(self.block_hash(sequence, index))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of the prefix, not in its table, for which a waiting request would find KV in the cache."""
        return len(self.hits(request.computing[0])) * self.block_size

    def partial_hit(self, sequence: Sequence, table: tuple[int, ...]) -> tuple[int, int] | None:
        """The cached partial block that continues `table`, and how many tokens of the sequence it holds.

        table: what the sequence has and its hits, all of it full. A block that an unfinished step may still
        write to is none. The longest is taken; it is only shared: the first to write copies it, or is alone.
        """
        if not self._reuses_partial_blocks or not table or sequence.request.new.bypass_prefix_cache:
            return None
        num_left = sequence.num_known_tokens - len(table) * self.block_size
        for num_tokens in self.device.partial_lengths(table[-1]):
            if num_tokens > num_left:
                continue
            block_id = self.device.lookup(self._partial_hash(sequence, len(table), num_tokens))
            if block_id is not None and not self.device.is_fenced(block_id):
                return block_id, num_tokens
        return None

    def cache_partial_block(self, sequence: Sequence) -> None:
        """Cache the last block of a sequence that ended well, for the tokens whose KV ended steps have made.

        What continues its tokens, as the next turn of a conversation does, then computes from there on.
        """
        index, num_tokens = divmod(sequence.num_accepted_tokens, self.block_size)
        if not self._reuses_partial_blocks or not num_tokens or not index:
            return
        if sequence.num_cached_blocks < index:
            return
        table, block_hash = self.tables[sequence.seq_id], self._partial_hash(sequence, index, num_tokens)
        self.device.cache_partial_block(
            table[index], block_hash, num_tokens, depth=index, parent=table[index - 1]
        )

    def _partial_hash(self, sequence: Sequence, index: int, num_tokens: int) -> bytes:
        """Hash of the first tokens of the index-th block, index at least 1."""
        assert self._hasher is not None
        start = index * self.block_size
        tokens = sequence.tokens[start : start + num_tokens]
        block_hash = self._hasher.extend(self.block_hash(sequence, index - 1), tokens)
        if self.noted_hashes is not None:
            self.noted_hashes[sequence.seq_id, start + num_tokens] = block_hash
        return block_hash

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Cache each full block whose KV an ended step has made.

        Where a block of the same content is cached already, the request shares that one and gives its own
        back: what continues it is then cached behind a block that this request holds.
        """
        if self._hasher is None:
            return
        for index in range(sequence.num_cached_blocks, sequence.num_accepted_tokens // self.block_size):
            table = self.tables.get(sequence.seq_id, ())  # replaced where a twin was found before
            own, parent = table[index], table[index - 1] if index else None
            block_hash = self.block_hash(sequence, index)
            cached = self.device.cache_block(own, block_hash, depth=index, parent=parent)
            if cached is None:
                return
            if cached != own:
                self._share_instead(sequence.request, index, own, cached)
            sequence.num_cached_blocks = index + 1

    def offer_blocks(self, sequence: Sequence) -> None:
        """Have its cached blocks that were not yet handed over saved behind the host, in order."""
        first, end = sequence.num_offered_blocks, sequence.num_cached_blocks
        if self.tiers is not None and self.tiers.disk is not None and first < end:
            self.tiers.offer(self.block_hash(sequence, index) for index in range(first, end))
            sequence.num_offered_blocks = end

    def end_offers(self, sequence: Sequence) -> None:
        """It has ended: blocks that it did not get to hand over, since they are not cached, never come."""
        first, end = sequence.num_offered_blocks, sequence.num_accepted_tokens // self.block_size
        if self.tiers is not None and self.tiers.disk is not None:
            self.tiers.withhold(self.block_hash(sequence, index) for index in range(first, end))

    def _share_instead(self, request: Request, index: int, own: int, cached: int) -> None:
        """Let all tables of the request that name its own block at `index` name its cached twin."""
        release = Release(fence=request.last_step)
        for sequence in request.unfinished:
            table = self.tables.get(sequence.seq_id, ())
            if index < len(table) and table[index] == own:
                self.device.share(cached)
                self.tables[sequence.seq_id] = _with_block(table, index, cached)
                self.device.release(own, release)

    # --- growing ---------------------------------------------------------------------------

    def claim(self, sequence: Sequence, block_ids: list[int], num_full: int) -> None:
        """Append pinned cached blocks to the table, one reference each; the first `num_full` are full."""
        table = self.tables.get(sequence.seq_id, ())
        if sequence.num_cached_blocks == len(table):
            sequence.num_cached_blocks += num_full
        for block_id in held(tuple(block_ids)):
            self.device.share(block_id)
        self.tables[sequence.seq_id] = (*table, *block_ids)

    def pin(self, block_ids: Iterable[int]) -> None:
        """Hold cached blocks until their claims are carried out, so that no allocation evicts them."""
        for block_id in block_ids:
            if block_id != NO_BLOCK:
                self.device.share(block_id)
                self.device.count_hit(block_id)

    def unpin(self, block_ids: Iterable[int], release: Release) -> None:
        """Give back the references that `pin` took."""
        for block_id in block_ids:
            if block_id != NO_BLOCK:
                self.device.release(block_id, release)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Make the table cover `num_tokens` slots. Raises OutOfBlocks and changes nothing."""
        table = self.tables.get(sequence.seq_id, ())
        missing = blocks_for(num_tokens, self.block_size) - len(table)
        if missing > 0:
            self.tables[sequence.seq_id] = (*table, *self.device.allocate(missing))

    def restore(self, sequence: Sequence, host_blocks: Iterable[int]) -> tuple[BlockCopy, ...]:
        """Append a fresh block for each of these, cached on the host; returns the copies to be made.

        Raises OutOfBlocks and changes nothing.
        """
        sources = tuple(host_blocks)
        fresh = self.device.allocate(len(sources))
        self.tables[sequence.seq_id] = (*self.tables.get(sequence.seq_id, ()), *fresh)
        return tuple(map(BlockCopy, sources, fresh))

    def prepare_write(self, sequence: Sequence, position: int, release: Release) -> BlockCopy | None:
        """Make the block of `position` safe to write for this sequence alone.

        A shared block is replaced by a fresh one and the copy to be made is returned. A cached block
        held once is uncached. Raises OutOfBlocks and changes nothing.
        """
        table = self.tables.get(sequence.seq_id, ())
        index = position // self.block_size
        if index >= len(table):
            return None
        block_id = table[index]
        if self.device.ref_count(block_id) == 1:
            self.device.uncache_block(block_id)
            return None
        (fresh,) = self.device.allocate(1)
        self.tables[sequence.seq_id] = _with_block(table, index, fresh)
        self.device.release(block_id, release)
        return BlockCopy(block_id, fresh)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let `child` share the blocks that hold the parent's first `num_tokens` tokens."""
        assert child.seq_id not in self.tables, f"sequence {child.seq_id} already has a table"
        shared = self.tables[parent.seq_id][: blocks_for(num_tokens, self.block_size)]
        for block_id in held(shared):
            self.device.share(block_id)
        self.tables[child.seq_id] = shared
        child.num_cached_blocks = min(parent.num_cached_blocks, num_tokens // self.block_size)
        child.block_hashes = parent.block_hashes[: num_tokens // self.block_size]

    # --- giving up -------------------------------------------------------------------------

    def free(self, sequence: Sequence, release: Release) -> None:
        """Drop the whole table, tails first, so that heads stay cached longest. No table: no effect."""
        release = replace(release, num_chain_blocks=sequence.num_cached_blocks)
        for block_id in reversed(held(self.tables.pop(sequence.seq_id, ()))):
            self.device.release(block_id, release)

    def truncate(self, sequence: Sequence, num_blocks: int, release: Release) -> None:
        """Keep the first `num_blocks` blocks of the table."""
        table = self.tables.get(sequence.seq_id, ())
        release = replace(release, num_chain_blocks=sequence.num_cached_blocks)
        for block_id in reversed(held(table, num_blocks)):
            self.device.release(block_id, release)
        if num_blocks and table:
            self.tables[sequence.seq_id] = table[:num_blocks]
        else:
            self.tables.pop(sequence.seq_id, None)

    def tail_cuts(self, request: Request, num_blocks: int) -> list[tuple[Sequence, int]]:
        """How to free `num_blocks` exclusive tail blocks: (sequence, blocks it keeps), last choice first.

        What a sequence keeps ends at a block boundary of its computed KV.
        """
        cuts = []
        for sequence in reversed(request.unfinished):
            if num_blocks <= 0:
                break
            taken = min(num_blocks, self.num_tail_blocks(sequence))
            if taken:
                kept = len(self.table(sequence)) - taken
                cuts.append((sequence, min(kept, sequence.num_kv_tokens // self.block_size)))
                num_blocks -= taken
        return cuts

    def forget_content(self, sequence: Sequence) -> tuple[int, ...]:
        """Uncache every block of the table: its KV is not to be trusted. Returns their ids.

        Those that came from the cache too: the fault may be theirs, and would then strike every request that
        hits them next, for ever.
        """
        suspect = held(self.table(sequence))
        for block_id in suspect:
            self.device.uncache_block(block_id)
        return suspect

    # --- swapping --------------------------------------------------------------------------

    def swap_out(self, request: Request, release: Release) -> tuple[BlockCopy, ...]:
        """Move every block of the request to the host; returns the copies to be made.

        Raises OutOfBlocks, and changes nothing, if the host lacks room for its distinct blocks.
        """
        tables: dict[int, tuple[int, ...]] = {}
        for sequence in request.sequences:
            table = self.tables.get(sequence.seq_id)
            if table:
                tables[sequence.seq_id] = table[: blocks_for(sequence.num_kv_tokens, self.block_size)]
        distinct = list(dict.fromkeys(block_id for table in tables.values() for block_id in held(table)))
        host_of = dict(zip(distinct, self.host.allocate(len(distinct)), strict=True))
        seen: set[int] = set()
        for seq_id, table in tables.items():
            host_table = tuple(host_of.get(block_id, NO_BLOCK) for block_id in table)
            for host_block in held(host_table):
                if host_block in seen:
                    self.host.share(host_block)
                seen.add(host_block)
            self._host_tables[seq_id] = host_table
        for sequence in request.sequences:
            self.free(sequence, release)
        return tuple(BlockCopy(source, host_of[source]) for source in distinct)

    def swap_in(self, request: Request, hits: dict[int, int], release: Release) -> tuple[BlockCopy, ...]:
        """Bring a swapped request back; returns the copies to be made.

        hits: host block -> pinned device block that already holds the same KV; shared, not copied.
        Raises OutOfBlocks, and changes nothing, if the device lacks room for the rest.
        """
        distinct = [
            block_id
            for sequence in request.sequences
            for block_id in held(self._host_tables.get(sequence.seq_id, ()))
        ]
        missing = [block_id for block_id in dict.fromkeys(distinct) if block_id not in hits]
        device_of = dict(zip(missing, self.device.allocate(len(missing)), strict=True))
        fresh = set(device_of.values())
        device_of.update(hits)
        for sequence in request.sequences:
            host_table = self._host_tables.get(sequence.seq_id)
            if host_table is None:
                continue
            dropped = num_dropped(host_table)
            table = [NO_BLOCK] * dropped
            for host_block in host_table[dropped:]:
                block_id = device_of[host_block]
                if block_id in fresh:
                    fresh.discard(block_id)  # the allocation's reference becomes this entry's
                else:
                    self.device.share(block_id)
                table.append(block_id)
            self.tables[sequence.seq_id] = tuple(table)
            num_hits = len(list(itertools.takewhile(hits.__contains__, host_table[dropped:])))
            sequence.num_cached_blocks = dropped + num_hits if num_hits else 0
        self.drop_host(request, release)
        return tuple(BlockCopy(host_block, device_of[host_block]) for host_block in missing)

    def drop_host(self, request: Request, release: Release) -> None:
        """Give the request's host blocks back (pending until `release.fence` has ended)."""
        for sequence in request.sequences:
            for host_block in held(self._host_tables.pop(sequence.seq_id, ())):
                self.host.release(host_block, release)

    def restore_tables(self, sequence: Sequence, table: tuple[int, ...], host_table: tuple[int, ...]) -> None:
        """Give a sequence that holds nothing the tables that `table` and `host_table` once answered.

        The pools are restored beside it: references are not counted anew."""
        if table:
            self.tables[sequence.seq_id] = table
        if host_table:
            self._host_tables[sequence.seq_id] = host_table

    # --- proof -----------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError unless both pools agree with the tables."""
        for pool, tables in ((self.device, self.tables), (self.host, self._host_tables)):
            references: Counter[int] = Counter()
            for table in tables.values():
                named = held(table)
                assert NO_BLOCK not in named, f"window: {table} has a hole"
                references.update(named)
            if pool is self.host and self.tiers is not None:
                self.tiers.check_integrity()
                references.update(self.tiers.held())
            pool.check_integrity(references)
        both = self.tables.keys() & self._host_tables.keys()
        assert not both, f"swapped: sequences {sorted(both)} hold device and host blocks"
