"""The tiers behind the device's prefix cache: which evicted block lives on in host memory, which on disk.

    device   --spill-->   host   --save-->   disk        a block leaves each tier by its own order of eviction
    device  <--restore--  host  <--load---   disk        what comes back stays where it was, too
    device   --offer-->   host   --save-->   disk        what is handed over goes while the device holds it

The host tier has no memory of its own: it is the cached blocks of the pool that requests are swapped out to,
and they are evictable there. So a swap takes their place whenever it needs it. Only blocks of transfers under
way are held, and never more than `num_cache_blocks`, by which the pool is larger than the swap space: a swap
finds room for whatever it would find room for without tiers.

A block may be in several tiers; in each, its hash finds it. In the host and on disk no block is kept for the
sake of those that continue it: chains fall to them from their ends, the end is the oldest, and it is evicted
first. A partial block that is evicted is lost: it saves less than one block's computation.

In place of a disk another server may stand there. Then nothing is saved but what requests hand over (see
`NewRequest.hands_over`), in the order in which it is made; and what was handed over to this server is loaded
as from a disk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from pageturner.service.core.memory.block import Block, Release
from pageturner.service.core.memory.block_pool import BlockPool
from pageturner.service.core.memory.transfers import (
    BlockDisk,
    Discard,
    Load,
    Save,
    Transfer,
    TransferEnd,
    Withhold,
)
from pageturner.service.core.outputs import BlockCopy

MAX_SAVES = 8
"""Writes under way: enough for the disk to be busy, few enough that what is read is not behind them."""


@dataclass(frozen=True, slots=True)
class TierState:
    """The tiers as a value, the host's cached blocks excepted: those are in its pool's.

    in_flight: (block of the host, whether it is a load, hash, whether what is loaded is to be cached).
    unsaved: hashes of the host's that were not offered to the disk yet, the oldest first. offered: those that
    are to be copied to the host and saved, in order.
    """

    in_flight: tuple[tuple[int, bool, bytes, bool], ...]
    unsaved: tuple[bytes, ...]
    offered: tuple[bytes, ...] = ()


@dataclass(slots=True)
class TierCounts:
    """Blocks since start: copied to the host, back from it, read from disk, and what went wrong there.

    spilled: of those that left the device, copied to the host; others were there, or found no room.
    unwritten: saves that failed, and blocks that left the host before the disk had taken them.
    unread: loads that failed.
    """

    spilled: int = 0
    restored: int = 0
    loaded: int = 0
    unwritten: int = 0
    unread: int = 0


class CacheTiers:
    """host: the pool that swapped requests share. num_cache_blocks: of it, what transfers may hold.
    disk: None without one. saves_evictions: whether it is there for what the device evicts.

    found: for a recorder that takes them, the hashes that the disk was found to hold; None without one.
    """

    def __init__(
        self,
        host: BlockPool,
        num_cache_blocks: int,
        disk: BlockDisk | None,
        *,
        saves_evictions: bool = True,
    ) -> None:
        self.host = host
        self.disk = disk
        self.counts = TierCounts()
        self.found: dict[bytes, None] | None = None
        self._num_cache_blocks = num_cache_blocks
        self._in_flight: dict[int, Save | Load] = {}
        self._loading: dict[bytes, int] = {}
        self._saves_evictions = saves_evictions
        self._max_saves = MAX_SAVES if saves_evictions else num_cache_blocks
        self._unsaved: OrderedDict[bytes, None] = OrderedDict()
        self._offered: OrderedDict[bytes, None] = OrderedDict()
        self._outbox: list[Transfer] = []
        self._step: Release | None = None
        self._copies_out: list[BlockCopy] = []
        self._copies_in: list[BlockCopy] = []

    # --- what lies where -------------------------------------------------------------------

    def run(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the host that hold the first of these hashes, up to one that it lacks."""
        found = []
        for block_hash in hashes:
            host_block = self.host.lookup(block_hash)
            if host_block is None:
                break
            found.append(host_block)
        return found

    def loading(self, block_hash: bytes) -> int | None:
        """The block of the host into which it is being read, if it is."""
        return self._loading.get(block_hash)

    def is_on_disk(self, block_hash: bytes) -> bool:
        """Whether the disk holds the block, as it says now."""
        is_held = self.disk is not None and self.disk.holds(block_hash)
        if is_held and self.found is not None:
            self.found[block_hash] = None
        return is_held

    @property
    def num_held(self) -> int:
        """Blocks of the host that transfers hold."""
        return len(self._in_flight)

    @property
    def num_saves(self) -> int:
        """Writes under way."""
        return sum(isinstance(transfer, Save) for transfer in self._in_flight.values())

    @property
    def is_busy(self) -> bool:
        """Whether the disk has something to do, or will have once it has done that."""
        return bool(self._in_flight or self._unsaved or self._offered)

    @property
    def is_handing_over(self) -> bool:
        """Whether blocks are on their way to another server, which waits for them."""
        return not self._saves_evictions and bool(self._unsaved or self._offered or self.num_saves)

    def held(self) -> tuple[int, ...]:
        """The blocks of the host that transfers hold, one reference each."""
        return tuple(self._in_flight)

    # --- one step --------------------------------------------------------------------------

    def begin_step(self, release: Release) -> None:
        """From now on until `end_step`, blocks that the device evicts are copied to the host. release: fenced
        by the step."""
        self._step = release

    def spill(self, block: Block) -> None:
        """A cached block of the device is about to be overwritten: let it live on in the host, if it fits."""
        block_hash = block.block_hash
        assert block_hash is not None, f"block {block.block_id} is not cached"
        assert self._step is not None, "no block is taken but in a step"
        if block.num_partial_tokens:
            return
        there = self.host.lookup(block_hash)
        if there is not None:
            self.host.share(there)
            self.host.release(there, self._step)
        elif self.host.num_available:
            (host_block,) = self.host.allocate(1)
            self.host.cache_block(host_block, block_hash, depth=block.depth, parent=None)
            self.host.release(host_block, self._step)
            self._copies_out.append(BlockCopy(block.block_id, host_block))
            self.counts.spilled += 1
            if self.disk is not None and self._saves_evictions:
                self._unsaved[block_hash] = None

    def offer(self, block_hashes: Iterable[bytes]) -> None:
        """Have cached blocks of the device saved, in this order, while it still holds them."""
        assert self.disk is not None, "there is nobody to hand blocks over to"
        for block_hash in block_hashes:
            self._offered[block_hash] = None

    def withhold(self, block_hashes: Iterable[bytes]) -> None:
        """Tell who waits for these blocks that they will not come."""
        self._outbox += map(Withhold, block_hashes)

    def copy_offered(self, device: BlockPool) -> None:
        """In a step: copy what was offered to the host, as far as it is sure to be saved from there before
        others take its place."""
        assert self._step is not None, "blocks are copied in a step"
        while self._offered and self.num_held + len(self._unsaved) < self._num_cache_blocks:
            block_hash = next(iter(self._offered))
            source, there = device.lookup(block_hash), self.host.lookup(block_hash)
            if there is not None:
                self.host.share(there)  # it becomes the newest
                self.host.release(there, self._step)
            elif source is not None:
                if not self.host.num_available:
                    return  # until a swapped request is back
                (host_block,) = self.host.allocate(1)
                self.host.cache_block(host_block, block_hash, depth=0, parent=None)
                self.host.release(host_block, self._step)
                self._copies_out.append(BlockCopy(source, host_block))
            del self._offered[block_hash]
            self._unsaved[block_hash] = None  # one that is in neither pool is withheld in its turn

    def restore(self, copies: Sequence[BlockCopy]) -> None:
        """Have blocks that are held copied from the host to the device in this step."""
        self._copies_in += copies
        self.counts.restored += len(copies)

    def hold(self, host_blocks: Iterable[int]) -> None:
        """Keep cached blocks of the host where they are."""
        for host_block in host_blocks:
            self.host.share(host_block)

    def let_go(self, host_blocks: Sequence[int], release: Release) -> None:
        """Undo `hold`. The last one becomes the oldest of them: it ends the chain."""
        for host_block in reversed(host_blocks):
            self.host.release(host_block, release)

    def end_step(self) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
        """The copies of the step, to the host and from it."""
        copies = tuple(self._copies_out), tuple(self._copies_in)
        self._copies_out, self._copies_in, self._step = [], [], None
        return copies

    def fail_step(self, copies_out: Iterable[BlockCopy]) -> None:
        """A step failed: what it was to copy to the host may not be there."""
        for copy in copies_out:
            if self.host.is_cached(copy.destination):
                self.host.uncache_block(copy.destination)

    # --- the disk --------------------------------------------------------------------------

    def start_saves(self) -> None:
        """Have the oldest blocks that the disk was not offered yet written, as far as it keeps up."""
        num_saves = self.num_saves
        for block_hash in tuple(islice(self._unsaved, self._max_saves + num_saves)):
            if num_saves >= self._max_saves or self.num_held >= self._num_cache_blocks:
                return
            host_block = self.host.lookup(block_hash)
            if host_block in self._in_flight:
                continue  # handed over to one reader; another one's is next
            if host_block is not None and self.host.is_fenced(host_block):
                return  # its copy is not known to be made
            del self._unsaved[block_hash]
            if host_block is None:
                self._withhold(block_hash)
            elif not self.is_on_disk(block_hash):
                self.host.share(host_block)
                self._start(Save(host_block, block_hash))
                num_saves += 1

    def room_for_loads(self) -> int:
        """How many blocks may be loaded at once now; a fourth of what transfers may hold is left to saves."""
        left = max(1, self._num_cache_blocks * 3 // 4) - self.num_held
        return max(0, min(left, self.host.num_available))

    def load(self, block_hash: bytes) -> int:
        """Have a block read; the block of the host that it will be in. Raises OutOfBlocks without room."""
        (host_block,) = self.host.allocate(1)
        self._loading[block_hash] = host_block
        self._start(Load(host_block, block_hash))
        return host_block

    def end(self, ended: TransferEnd, now: float) -> None:
        """A transfer is over."""
        transfer = self._in_flight.pop(ended.host_block)
        if isinstance(transfer, Save):
            self.counts.unwritten += not ended.succeeded
        elif ended.succeeded:
            self.counts.loaded += 1
            if self._loading.get(transfer.block_hash) == ended.host_block:
                self.host.cache_block(ended.host_block, transfer.block_hash, depth=0, parent=None)
        else:
            self.counts.unread += 1
        if self._loading.get(transfer.block_hash) == ended.host_block:
            del self._loading[transfer.block_hash]
        self.host.release(ended.host_block, Release(now=now))

    def forget(self, block_hashes: Iterable[bytes]) -> None:
        """What lies under these hashes is not to be trusted, in no tier."""
        for block_hash in block_hashes:
            self._unsaved.pop(block_hash, None)
            self._offered.pop(block_hash, None)
            self._loading.pop(block_hash, None)  # what is under way is not cached when it comes
            host_block = self.host.lookup(block_hash)
            if host_block is not None:
                self.host.uncache_block(host_block)
            if self.disk is not None:
                self._outbox.append(Discard(block_hash))

    def take_transfers(self) -> tuple[Transfer, ...]:
        """What the disk is to do, once, in this order."""
        taken, self._outbox = tuple(self._outbox), []
        return taken

    def _withhold(self, block_hash: bytes) -> None:
        """The block is neither here nor saved, and will not be."""
        self.counts.unwritten += 1
        if not self._saves_evictions:
            self._outbox.append(Withhold(block_hash))

    def _start(self, transfer: Save | Load) -> None:
        assert transfer.host_block not in self._in_flight, f"host block {transfer.host_block} moves twice"
        self._in_flight[transfer.host_block] = transfer
        self._outbox.append(transfer)

    # --- as a value, and proof -------------------------------------------------------------

    def snapshot(self) -> TierState:
        """The state of this moment; no step may be open, and no save or load wait to be taken."""
        in_flight = []
        for host_block, transfer in self._in_flight.items():
            is_wanted = self._loading.get(transfer.block_hash) == host_block
            in_flight.append((host_block, isinstance(transfer, Load), transfer.block_hash, is_wanted))
        return TierState(tuple(in_flight), tuple(self._unsaved), tuple(self._offered))

    def restore_state(self, state: TierState) -> None:
        """Bring tiers just made to a state; their host pool is restored apart."""
        for host_block, is_load, block_hash, is_wanted in state.in_flight:
            self._in_flight[host_block] = (Load if is_load else Save)(host_block, block_hash)
            if is_wanted:
                self._loading[block_hash] = host_block
        self._unsaved = OrderedDict.fromkeys(state.unsaved)
        self._offered = OrderedDict.fromkeys(state.offered)

    def check_integrity(self) -> None:
        """Raise AssertionError, naming the invariant, unless the transfers under way agree with the pool."""
        assert self.num_held <= max(1, self._num_cache_blocks), "tiers: transfers hold what swaps may need"
        assert self._step is None, "tiers: a step is open"
        for block_hash, host_block in self._loading.items():
            assert self._in_flight.get(host_block) == Load(host_block, block_hash), "tiers: a load is lost"
            assert not self.host.is_cached(host_block), "tiers: a block is found before it is read"
