"""The disk behind the prefix cache's host tier: which blocks it holds, and the threads that move them.

The engine's thread asks what is held, gives transfers and takes their ends; it never waits for the disk. One
thread reads, another writes and removes, so that no request waits behind writes. A block is held from the end
of its save on, and no more from the moment at which its place is given away.
"""

from __future__ import annotations

import queue
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic

from structlog.typing import FilteringBoundLogger

from pageturner.service.core.memory.transfers import Discard, Load, Save, Transfer, TransferEnd, Withhold
from pageturner.service.engine.lower_tier import CachedBlock, Jobs, Ready
from pageturner.service.engine.tier_files import DamagedBlock, TierFiles

LOG_SECONDS = 60.0
"""At most one line in so long about writes that fail, and one about reads."""


@dataclass(frozen=True, slots=True)
class _Job:
    transfer: Transfer
    ready: Ready


class DiskTier:
    """files: of this model. capacity: blocks held at most. host_block: the bytes of a block of the host, to
    be read and written. found: blocks that are there already, the one used last at the end.

    Bound to one thread, as a `core.memory.transfers.BlockDisk`.
    """

    def __init__(
        self,
        files: TierFiles,
        capacity: int,
        host_block: Callable[[int], memoryview],
        found: Iterable[bytes],
        logger: FilteringBoundLogger,
    ) -> None:
        self._files = files
        self._capacity = capacity
        self._host_block = host_block
        self._logger = logger
        self._held: OrderedDict[bytes, None] = OrderedDict.fromkeys(found)
        self._discarded: set[bytes] = set()
        self._num_under_way = 0
        self._ended: queue.SimpleQueue[tuple[Transfer, bool]] = queue.SimpleQueue()
        self._logged_at: dict[str, float] = {}
        self._loads = self._worker("pageturner-tier-read")
        self._writes = self._worker("pageturner-tier-write")

    # --- as a disk of the core -------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Blocks that it holds."""
        return len(self._held)

    def holds(self, block_hash: bytes) -> bool:
        """Whether a Load of this hash may succeed."""
        return block_hash in self._held

    # --- for the engine --------------------------------------------------------------------

    def start(self, transfers: Iterable[Transfer], ready: Ready) -> None:
        """Begin transfers, in this order where they are writes. Returns at once."""
        for transfer in transfers:
            match transfer:
                case Load():
                    if transfer.block_hash in self._held:
                        self._held.move_to_end(transfer.block_hash)
                    self._num_under_way += 1
                    self._loads.put(_Job(transfer, ready))
                case Save():
                    self._discarded.discard(transfer.block_hash)
                    self._num_under_way += 1
                    self._writes.put(_Job(transfer, ready))
                case Discard():
                    self._held.pop(transfer.block_hash, None)
                    self._discarded.add(transfer.block_hash)
                    self._writes.put(_Job(transfer, ready))
                case Withhold():
                    pass  # nobody waits for a file

    def take_ended(self) -> tuple[TransferEnd, ...]:
        """The saves and loads that are over and were not told of yet."""
        ended: list[TransferEnd] = []
        while True:
            try:
                transfer, succeeded = self._ended.get_nowait()
            except queue.Empty:
                return tuple(ended)
            if not isinstance(transfer, Load | Save):
                self._discarded.discard(transfer.block_hash)
                continue
            self._num_under_way -= 1
            block_hash = transfer.block_hash
            if isinstance(transfer, Load) and not succeeded:
                self._held.pop(block_hash, None)
            elif isinstance(transfer, Save) and succeeded and block_hash not in self._discarded:
                self._hold(block_hash)
            ended.append(TransferEnd(transfer.host_block, succeeded))

    @property
    def is_busy(self) -> bool:
        """Whether a save or a load is under way."""
        return self._num_under_way > 0

    def close(self, cached: Iterable[CachedBlock] = (), seconds: float = 0.0) -> int:
        """The last call: ends what is under way, and writes blocks that it does not hold yet, the first ones
        first, within so many seconds. Returns how many those were."""
        until = monotonic() + seconds
        for jobs in (self._loads, self._writes):
            jobs.put(None)
            jobs.thread.join(max(0.1, until - monotonic()))
        self.take_ended()
        num_written = 0
        try:
            for block in cached:
                if monotonic() >= until or num_written >= self._capacity:
                    break
                if block.block_hash not in self._held:
                    self._files.write(block.block_hash, block.content())
                    self._hold(block.block_hash)
                    num_written += 1
        except OSError as error:
            self._log("disk_cache_write_failed", error)
        while not self._writes.is_empty:  # blocks that gave way
            self._run(self._writes.get())
        self._files.close()
        return num_written

    # --- inside ----------------------------------------------------------------------------

    def _hold(self, block_hash: bytes) -> None:
        """The block was written; if it is one too many, those that were used longest ago give way."""
        self._held[block_hash] = None
        self._held.move_to_end(block_hash)
        while len(self._held) > self._capacity:
            oldest, _ = self._held.popitem(last=False)
            self._discarded.add(oldest)
            self._writes.put(_Job(Discard(oldest), _at_once))

    def _worker(self, name: str) -> Jobs[_Job]:
        jobs = Jobs(name, self._run)
        jobs.thread.start()
        return jobs

    def _run(self, job: _Job) -> None:
        """In a thread of the tier's."""
        transfer, succeeded = job.transfer, False
        try:
            job.ready()
            self._move(transfer)
            succeeded = True
        except (DamagedBlock, OSError) as error:
            if isinstance(transfer, Load):
                self._files.remove(transfer.block_hash)
            self._log(f"disk_cache_{'read' if isinstance(transfer, Load) else 'write'}_failed", error)
        except Exception as error:  # a fault of ours costs the blocks it met, and no request
            self._log("disk_cache_fault", error)
        self._ended.put((transfer, succeeded))

    def _move(self, transfer: Transfer) -> None:
        match transfer:
            case Load(host_block, block_hash):
                self._files.read(block_hash, self._host_block(host_block))
                self._files.touch(block_hash)
            case Save(host_block, block_hash):
                self._files.write(block_hash, self._host_block(host_block))
            case Discard(block_hash):
                self._files.remove(block_hash)

    def _log(self, event: str, error: Exception) -> None:
        now = monotonic()
        if now - self._logged_at.get(event, -LOG_SECONDS) >= LOG_SECONDS:
            self._logged_at[event] = now
            self._logger.warning(event, reason=f"{type(error).__name__}: {error}")


def _at_once() -> None:
    """Nothing is waited for."""
