"""What stands behind the host tier of the prefix cache, for the engine's thread: a disk, or a server."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from pageturner.service.core.memory.transfers import BlockDisk, Transfer, TransferEnd

_Job = TypeVar("_Job")

Ready: TypeAlias = Callable[[], object]
"""Returns when blocks of the host may be read and written: what the device enqueued before is done."""


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A block of the prefix cache where it lies, for the last moment of a server. content: its bytes."""

    block_hash: bytes
    content: Callable[[], memoryview]


class LowerTier(BlockDisk, Protocol):
    """Carries out transfers, and never keeps the engine's thread waiting."""

    def start(self, transfers: Iterable[Transfer], ready: Ready) -> None:
        """Begin transfers. Returns at once."""
        ...

    def take_ended(self) -> tuple[TransferEnd, ...]:
        """The saves and loads that are over and were not told of yet."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether a save or a load is under way."""
        ...

    def close(self, cached: Iterable[CachedBlock] = (), seconds: float = 0.0) -> int:
        """The last call. cached: what only memory holds. Returns how many of these were kept, within so many
        seconds."""
        ...


class Jobs(Generic[_Job]):
    """A queue, and the thread that does what comes, in its order, until None comes."""

    def __init__(self, name: str, run: Callable[[_Job], None]) -> None:
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._do = run
        # A disk that hangs must not keep the process from exiting.
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)

    def put(self, job: _Job | None) -> None:
        self._queue.put(job)

    def get(self) -> _Job:
        job = self._queue.get()
        assert job is not None, "the thread has taken its end"
        return job

    @property
    def is_empty(self) -> bool:
        return self._queue.empty()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            self._do(job)
