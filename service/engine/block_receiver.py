"""Takes blocks in that other servers hand over: what stands behind the host tier of a server that decodes.

They lie here under the hashes that the scheduler has of them, until it has those that it wants loaded into
the host pool, as from a disk. What is not asked for gives way to what comes later.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from pageturner.service.core.memory.transfers import Discard, Load, Save, Transfer, TransferEnd
from pageturner.service.engine.lower_tier import CachedBlock, Jobs, Ready

CLOSING_SECONDS = 1.0
"""How long the end waits for a copy under way."""


@dataclass(frozen=True, slots=True)
class _Job:
    load: Load
    ready: Ready


class BlockReceiver:
    """A `LowerTier`. capacity: blocks that lie here at most. host_block: the bytes of a block of the host
    pool, to be written.

    `put` is for any thread, the rest for the engine's.
    """

    def __init__(
        self, capacity: int, host_block: Callable[[int], memoryview], logger: FilteringBoundLogger
    ) -> None:
        self.capacity = capacity
        self._host_block = host_block
        self._logger = logger
        self._lock = threading.Lock()
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self._num_under_way = 0
        self._ended: queue.SimpleQueue[TransferEnd] = queue.SimpleQueue()
        self._loads = Jobs("pageturner-handover", self._run)
        self._loads.thread.start()

    def put(self, block_hash: bytes, content: bytes) -> None:
        """A block was handed over; those that came longest ago give way where there is no room."""
        with self._lock:
            self._blocks[block_hash] = content
            self._blocks.move_to_end(block_hash)
            while len(self._blocks) > self.capacity:
                self._blocks.popitem(last=False)

    # --- as a lower tier -------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Blocks that lie here."""
        return len(self._blocks)

    def holds(self, block_hash: bytes) -> bool:
        """Whether a load of this hash may succeed."""
        return block_hash in self._blocks

    @property
    def is_busy(self) -> bool:
        """Whether a load is under way."""
        return self._num_under_way > 0

    def start(self, transfers: Iterable[Transfer], ready: Ready) -> None:
        """Begin loads."""
        for transfer in transfers:
            match transfer:
                case Load():
                    self._num_under_way += 1
                    self._loads.put(_Job(transfer, ready))
                case Save():
                    self._num_under_way += 1
                    self._ended.put(TransferEnd(transfer.host_block, succeeded=False))
                case Discard(block_hash):
                    with self._lock:
                        self._blocks.pop(block_hash, None)

    def take_ended(self) -> tuple[TransferEnd, ...]:
        """The transfers that are over and were not told of yet."""
        ended = []
        while not self._ended.empty():
            ended.append(self._ended.get())
        self._num_under_way -= len(ended)
        return tuple(ended)

    def close(self, cached: Iterable[CachedBlock] = (), seconds: float = 0.0) -> int:
        """The last call. Nothing is kept."""
        self._loads.put(None)
        self._loads.thread.join(CLOSING_SECONDS)
        with self._lock:
            self._blocks.clear()
        return 0

    def _run(self, job: _Job) -> None:
        """In the tier's thread."""
        load, succeeded = job.load, False
        with self._lock:
            content = self._blocks.pop(load.block_hash, None)
        try:
            job.ready()
            if content is not None:
                self._host_block(load.host_block)[:] = content
                succeeded = True
        except Exception as error:  # a fault of ours costs the block, and no request
            self._logger.error("handover_load_failed", reason=f"{type(error).__name__}: {error}")
        self._ended.put(TransferEnd(load.host_block, succeeded))
