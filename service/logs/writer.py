"""Writes the log from a thread of its own, so that a log that cannot be written delays and fails nothing.

A full disk, a reader that went away and a pipe that is not read cost lines, which are counted: once a line
can be written again, one that tells the count goes before it.
"""

from __future__ import annotations

import io
import os
import select
import stat
import threading
from collections import deque
from collections.abc import Callable

MAX_QUEUED_BYTES = 1 << 20
"""Lines that wait for the writer; more are dropped."""

FLUSH_SECONDS = 1.0
"""How long the end of the process waits for lines that are still to be written."""


class LogWriter:
    """Takes lines from any thread, and writes them in order.

    write: takes bytes and says how many; may block, and may raise OSError. lost_line: what is written where
    so many lines were dropped.
    """

    def __init__(
        self,
        write: Callable[[bytes], int],
        lost_line: Callable[[int], bytes],
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        self._write = write
        self._lost_line = lost_line
        self._max_queued_bytes = max_queued_bytes
        # Reentrant, since a finalizer that runs within `put` may have something to log.
        self._changed = threading.Condition(threading.RLock())
        self._lines: deque[bytes] = deque()
        self._queued_bytes = 0
        self._num_lost = 0  # since the last line that was written
        self._num_lost_before = 0
        self._is_closed = False
        # Whether the last line was written in part: the next one begins on a line of its own.
        self._is_torn = False
        self._thread = threading.Thread(target=self._run, name="pageturner-log", daemon=True)
        self._thread.start()

    @property
    def num_lost(self) -> int:
        """Lines that were not written, since the start."""
        with self._changed:
            return self._num_lost_before + self._num_lost

    def put(self, line: bytes) -> None:
        """Queue a line, or count it as lost. Neither blocks nor raises."""
        with self._changed:
            if self._is_closed or self._queued_bytes + len(line) > self._max_queued_bytes:
                self._num_lost += 1
                return
            self._lines.append(line)
            self._queued_bytes += len(line)
            self._changed.notify()

    def close(self, timeout: float = FLUSH_SECONDS) -> None:
        """Write what is queued, for so many seconds at most. What is put from now on is dropped."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        while (line := self._next()) is not None:
            with self._changed:
                num_lost = self._num_lost
            lost = b"" if not num_lost else self._lost_line(num_lost)
            is_written = self._write_whole(lost + line)
            with self._changed:
                self._queued_bytes -= len(line)
                if is_written:
                    self._num_lost -= num_lost
                    self._num_lost_before += num_lost
                else:
                    self._num_lost += 1

    def _next(self) -> bytes | None:
        """The next line when there is one, or None when there will be none."""
        with self._changed:
            while not self._lines:
                if self._is_closed:
                    return None
                self._changed.wait()
            return self._lines.popleft()

    def _write_whole(self, data: bytes) -> bool:
        """Whether all of it could be written."""
        if self._is_torn:
            data = b"\n" + data
        num_written = 0
        try:
            while num_written < len(data):
                num_written += self._write(data[num_written:])
        except OSError:
            self._is_torn |= num_written > 0
            return False
        self._is_torn = False
        return True


class LogStream(io.TextIOBase):
    """A text stream in front of a LogWriter. encoding: of the log. is_terminal: whether a person reads it.

    It has no descriptor: nothing that is written to it blocks.
    """

    def __init__(self, writer: LogWriter, encoding: str, is_terminal: bool) -> None:
        self._writer = writer
        self._encoding = encoding
        self._is_terminal = is_terminal
        self._lock = threading.RLock()
        self._unfinished = ""

    @property
    def encoding(self) -> str:  # type: ignore[override] # a property there too, of a stream without one
        return self._encoding

    def isatty(self) -> bool:
        return self._is_terminal

    def writable(self) -> bool:
        return True

    @property
    def num_lines_lost(self) -> int:
        """Lines that were not written, since the start."""
        return self._writer.num_lost

    def write(self, text: str) -> int:
        """Queue the lines that are complete with this text."""
        with self._lock:
            lines, newline, self._unfinished = (self._unfinished + text).rpartition("\n")
            if newline:
                self._put(lines + newline)
        return len(text)

    def flush(self) -> None:
        """Queue what has no end of line yet."""
        with self._lock:
            text, self._unfinished = self._unfinished, ""
            if text:
                self._put(text)

    def finish(self, timeout: float = FLUSH_SECONDS) -> None:
        """Write what is queued, for so many seconds at most; the last call."""
        self.flush()
        self._writer.close(timeout)

    def _put(self, text: str) -> None:
        self._writer.put(text.encode(self._encoding, "backslashreplace"))


def write_descriptor(descriptor: int) -> Callable[[bytes], int]:
    """`os.write` to a descriptor, which waits where that one was set not to block."""

    def write(data: bytes) -> int:
        while True:
            try:
                return os.write(descriptor, data)
            except BlockingIOError:
                select.select([], [descriptor], [])

    return write


def keep_from_blocking(descriptor: int) -> None:
    """Let writes of C libraries to a pipe that is full fail, where they would wait for its reader.

    The pipe is opened once more: the way of writing belongs to what was opened, which other processes share.
    """
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return
    try:
        opened = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # it has no reader, hence blocks nothing; or the system has no such files
        return
    os.dup2(opened, descriptor)
    os.close(opened)
