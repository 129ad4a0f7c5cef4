"""Flight records leave the engine: as bytes on demand, as files on a fault."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from pageturner.service.core.clock import Clock
from pageturner.service.flight import flight_file
from pageturner.service.flight.records import FlightRecord

MAX_DUMPS = 8
"""Files of one process: a fault that comes again and again shall not fill the disk."""

REST = 9.0
"""After a file on demand was made, so many times as long none is begun: a tenth of the time at most."""

MAX_REST_SECONDS = 5.0
"""But no longer than this, which an operator may have to wait for a file."""

PAUSE_SECONDS = 0.0005
"""A maker of files lets go of the interpreter for so long after each few lines: a thread that only waits for
its turn would take it from the engine's for 5 ms at a time."""


class FlightDumps:
    """record: what is kept at this moment, with the reason it was asked for; from any thread.

    directory: made when there is something to write. prefix: of the names of files, another one for each
    process. num_lost: files that could not be written.
    """

    def __init__(
        self,
        record: Callable[[str], FlightRecord],
        directory: Path,
        prefix: str,
        clock: Clock,
        logger: FilteringBoundLogger,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.num_lost = 0
        self._record = record
        self._directory = directory
        self._prefix = prefix
        self._clock = clock
        self._logger = logger
        self._sleep = sleep
        self._num_dumps = 0
        self._writers: list[threading.Thread] = []
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[bytes] | None = None
        self._may_begin_at = 0.0

    async def content(self) -> bytes:
        """The file as it is at some moment after this call; on the event loop, made in a thread.

        One is in the making at a time. All who ask before it is begun share it, and between two there is a
        rest (REST, MAX_REST_SECONDS), so that callers in a loop take little of the machine from the engine.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._make())
        return await asyncio.shield(self._next)

    async def _make(self) -> bytes:
        async with self._turn:
            await self._sleep(max(0.0, self._may_begin_at - self._clock.now()))
            self._next = None  # it shows this moment: callers from now on share the next one
            begun = self._clock.now()
            try:
                return await asyncio.to_thread(_made, self._record("asked for"))
            finally:
                ended = self._clock.now()
                self._may_begin_at = ended + min(MAX_REST_SECONDS, REST * (ended - begun))

    def on_fault(self, reason: str) -> None:
        """Write a file, in a thread of its own: the caller goes on at once, whatever becomes of it.

        reason: says nothing of what users wrote.
        """
        if self._num_dumps >= MAX_DUMPS:
            return
        self._num_dumps += 1
        path = self._directory / f"{self._prefix}-{self._num_dumps}.jsonl.gz"
        record = self._record(reason)
        writer = threading.Thread(target=self._write, args=(path, record), name="flight-dump")
        try:
            writer.start()
        except RuntimeError as error:  # no more threads, or the interpreter ends
            self._lost(path, error)
        else:
            self._writers.append(writer)

    def join(self) -> None:
        """Wait until all that was begun is written."""
        for writer in self._writers:
            writer.join()
        self._writers.clear()

    def _write(self, path: Path, record: FlightRecord) -> None:
        part = path.with_suffix(".part")
        try:
            content = _made(record)
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(content)
            part.replace(path)
        except Exception as error:  # the thread has no caller to raise it to
            self._lost(path, error)
            try:
                part.unlink(missing_ok=True)
            except OSError:
                return  # the folder itself is out of reach, as was just logged
        else:
            self._logger.warning("flight_record_written", path=str(path), num_bytes=len(content))

    def _lost(self, path: Path, error: Exception) -> None:
        self.num_lost += 1
        reason = f"{type(error).__name__}: {error}"
        self._logger.error("flight_record_lost", path=str(path), reason=reason, num_lost=self.num_lost)


def _made(record: FlightRecord) -> bytes:
    return flight_file.dump(record, lambda: time.sleep(PAUSE_SECONDS))
