"""A flight record as a file: JSON lines, the first one its head, then one for each entry; gzip or plain."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import chain

from pageturner.service.errors import PageturnerError
from pageturner.service.flight.plain import Malformed, from_plain, to_plain
from pageturner.service.flight.records import Entry, FlightRecord, FlightStart, Setting

FORMAT = "pageturner flight record"
VERSION = 1
GZIP_MAGIC = b"\x1f\x8b"


class NotAFlightRecord(PageturnerError):
    """A file is no flight record, or one of another version, or damaged; says where."""


def dump(record: FlightRecord) -> bytes:
    """The record as a gzip file. Equal records give equal bytes."""
    text = "".join(line + "\n" for line in lines(record))
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)


def lines(record: FlightRecord) -> Iterator[str]:
    """The file, line by line."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "reason": record.reason,
        "setting": to_plain(record.setting, is_whole=True),
        "start": to_plain(record.start),
        "num_dropped": record.num_dropped,
    }
    for line in chain((head,), map(to_plain, record.entries)):
        yield json.dumps(line, separators=(",", ":"))


def load(content: bytes) -> FlightRecord:
    """Raises NotAFlightRecord. A last line that was cut off is an error: it may hold the fault."""
    try:
        text = (gzip.decompress(content) if content.startswith(GZIP_MAGIC) else content).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise NotAFlightRecord(f"not readable: {error}") from error
    number, written = 1, text.splitlines()
    try:
        head = _json_or_none(written[0]) if written else None
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise NotAFlightRecord(f"not a {FORMAT}")
        if head.get("version") != VERSION:
            raise NotAFlightRecord(f"version {head.get('version')!r}; this program reads {VERSION}")
        setting = from_plain(Setting, head.get("setting"))
        start = from_plain(FlightStart | None, head.get("start"))
        reason, num_dropped = from_plain(str, head.get("reason")), from_plain(int, head.get("num_dropped"))
        entries = []
        for line in written[1:]:
            number += 1
            entries.append(from_plain(Entry, json.loads(line)))
    except (Malformed, json.JSONDecodeError) as error:
        raise NotAFlightRecord(f"line {number}: {error}") from error
    return FlightRecord(reason, setting, start, num_dropped, tuple(entries))


def _json_or_none(line: str) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None
