"""The lines of a trace or a recording as they lie in a file.

Plain or gzip, with or without a byte order mark, whatever ends the lines. A last line that was cut, as by
a full disk or SIGKILL while it was written, costs that line and a note; any other that cannot be read is a
LineError.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from pageturner.loadtest.traces.errors import LineError

_GZIP_MAGIC = b"\x1f\x8b"
_LINES_A_REPORT = 1 << 14

OnBytes = Callable[[int, int], None]
"""Told the bytes read so far, and those of the whole file (0 where it has no size, as a pipe)."""


def ignore_bytes(_done: int, _total: int) -> None:
    """The OnBytes of a caller that shows no progress."""


class TraceLines(Iterator[str]):
    """The lines of an open file, each with its end. number: of the last line given, from 1. notes: what a
    reader left out, in words."""

    def __init__(self, raw: io.BufferedReader, on_bytes: OnBytes) -> None:
        is_gzip = raw.peek(2)[:2] == _GZIP_MAGIC
        binary = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if is_gzip else raw
        self._raw = raw
        self._text = io.TextIOWrapper(binary, encoding="utf-8-sig", newline="")
        self._size = os.fstat(raw.fileno()).st_size
        self._on_bytes = on_bytes
        self._is_peeked = False
        self.number = 0
        self.last = ""
        self.notes: list[str] = []

    def peek(self) -> str:
        """The next line that is not blank, which comes next again; empty at the end. Raises as `__next__`."""
        for line in self:
            if line.strip():
                self._is_peeked = True
                return line
        return ""

    def __next__(self) -> str:
        """Raises LineError where the file is not UTF-8 or its compression is damaged."""
        if self._is_peeked:
            self._is_peeked = False
            return self.last
        try:
            self.last = next(self._text)
        except UnicodeDecodeError as error:
            raise LineError(self.number + 1, "", f"is not UTF-8 text ({error.reason})") from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise LineError(self.number + 1, "", f"the gzip data are damaged here ({error})") from error
        self.number += 1
        if not self.number % _LINES_A_REPORT:
            self._on_bytes(self._raw.tell() if self._size else 0, self._size)
        return self.last

    @property
    def is_cut(self) -> bool:
        """The last line given has no end: what stands in it may be a part."""
        return not self.last.endswith(("\n", "\r"))

    def leave_out_cut_line(self) -> None:
        """Note that the last line, which was cut, plays no part."""
        self.notes.append(f"line {self.number} was cut off and is left out")


@contextmanager
def open_lines(path: Path, on_bytes: OnBytes = ignore_bytes) -> Iterator[TraceLines]:
    """Raises OSError."""
    with path.open("rb") as raw:
        yield TraceLines(raw, on_bytes)


def json_objects(lines: TraceLines) -> Iterator[dict[str, Any]]:
    """The object of every line that is not blank; `lines.number` is that of its line. Raises LineError."""
    for line in lines:
        if not line.strip():
            continue
        try:
            entry = json.loads(line.rstrip("\r\n"))
        except (ValueError, RecursionError) as error:
            if lines.is_cut:
                lines.leave_out_cut_line()
                return
            if isinstance(error, json.JSONDecodeError):
                raise LineError(lines.number, f"column {error.colno}", error.msg) from error
            raise LineError(lines.number, "", f"is not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise LineError(lines.number, "", "is not a JSON object")
        yield entry
