"""Flight records leave the engine: as bytes on demand, as files on a fault."""

from __future__ import annotations

import threading
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from pageturner.service.flight import flight_file
from pageturner.service.flight.recorder import FlightRecorder

MAX_DUMPS = 8
"""Files of one process: a fault that comes again and again shall not fill the disk."""


class FlightDumps:
    """recorder: of the engine's scheduler. directory: made when there is something to write.

    prefix: of the names of files, another one for each process.
    """

    def __init__(
        self, recorder: FlightRecorder, directory: Path, prefix: str, logger: FilteringBoundLogger
    ) -> None:
        self._recorder = recorder
        self._directory = directory
        self._prefix = prefix
        self._logger = logger
        self._num_dumps = 0
        self._writers: list[threading.Thread] = []

    def content(self, reason: str) -> bytes:
        """The file as it would be now. From any thread; takes some tenths of a second."""
        return flight_file.dump(self._recorder.record(reason))

    def on_fault(self, reason: str) -> None:
        """Write a file, in a thread of its own: whoever met the fault goes on at once.

        reason: says nothing of what users wrote.
        """
        if self._num_dumps >= MAX_DUMPS:
            return
        self._num_dumps += 1
        path = self._directory / f"{self._prefix}-{self._num_dumps}.jsonl.gz"
        record = self._recorder.record(reason)
        writer = threading.Thread(
            target=lambda: self._write(path, flight_file.dump(record)), name="flight-dump"
        )
        self._writers.append(writer)
        writer.start()

    def join(self) -> None:
        """Wait until all that was begun is written."""
        for writer in self._writers:
            writer.join()
        self._writers.clear()

    def _write(self, path: Path, content: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            self._logger.error("flight_record_lost", path=str(path), reason=str(error))
        else:
            self._logger.warning("flight_record_written", path=str(path), num_bytes=len(content))
