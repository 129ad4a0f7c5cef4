"""A flight record as a file: JSON lines, the first one its head, then one for each entry; gzip or plain."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, get_args, get_origin

import cattrs
from cattrs.gen import make_dict_unstructure_fn
from cattrs.strategies import configure_tagged_union

from pageturner.policies.frozen_map import FrozenMap
from pageturner.policies.views import Rates
from pageturner.service.codec import strict_converter
from pageturner.service.core.decisions import Decision
from pageturner.service.core.options import CacheOptions, SchedulerOptions, SpeculationOptions
from pageturner.service.errors import PageturnerError
from pageturner.service.flight.former_versions import from_version_1, with_bounds
from pageturner.service.flight.records import Entry, FlightRecord, FlightStart, Setting

FORMAT = "pageturner flight record"
VERSION = 2
READ_VERSIONS = (1, VERSION)
GZIP_MAGIC = b"\x1f\x8b"
LINES_A_PAUSE = 16
_GZIP = zlib.MAX_WBITS | 16
"""Of zlib: a gzip file, with its head and checksum."""


class NotAFlightRecord(PageturnerError):
    """A file is no flight record, or one of another version, or damaged; says where."""


class Malformed(Exception):
    """A value has no plain form, or a plain value is not what its annotation says."""


# --- values ----------------------------------------------------------------------------------


def _make_converter() -> cattrs.Converter:
    converter = strict_converter(omit_if_default=True)
    converter.register_unstructure_hook(bytes, lambda content: base64.b64encode(content).decode())
    converter.register_structure_hook(bytes, lambda text, _: base64.b64decode(text, validate=True))
    converter.register_unstructure_hook_func(
        lambda kind: kind is FrozenMap or _is_frozen_map(kind),
        lambda entries: [
            [converter.unstructure(key), converter.unstructure(value)]
            for key, value in sorted(entries.items(), key=str)
        ],
    )

    @converter.register_structure_hook_factory(_is_frozen_map)
    def read_map(annotation: Any) -> Callable[[Any, Any], FrozenMap[Any, Any]]:
        key_kind, value_kind = get_args(annotation)

        def read(pairs: Any, _: Any) -> FrozenMap[Any, Any]:
            entries: FrozenMap[Any, Any] = FrozenMap()
            for key, value in pairs:
                entries = entries.set(
                    converter.structure(key, key_kind), converter.structure(value, value_kind)
                )
            return entries

        return read

    # The hooks of classes last: they hold those of their fields.
    # Defaults that may change one day must be written down.
    for kind in (SchedulerOptions, CacheOptions, SpeculationOptions, Rates, Setting):
        whole = make_dict_unstructure_fn(kind, converter, _cattrs_omit_if_default=False)
        converter.register_unstructure_hook(kind, whole)
    for union in (Decision, Entry):
        configure_tagged_union(union, converter, tag_name="is")
    return converter


def _is_frozen_map(annotation: Any) -> bool:
    origin: object = get_origin(annotation)
    return origin is FrozenMap


_CONVERTER = _make_converter()


def to_plain(value: object, kind: Any = None) -> Any:
    """A value as `json.loads` gives it back. kind: its annotation, for a union. Raises Malformed."""
    try:
        return json.loads(json.dumps(_CONVERTER.unstructure(value, kind)))
    except (TypeError, ValueError) as error:
        raise Malformed(f"{error}") from error


def from_plain(kind: Any, plain: object) -> Any:
    """The value of this annotation of which `to_plain` made `plain`. Raises Malformed."""
    try:
        return _CONVERTER.structure(plain, kind)
    except KeyError as error:
        raise Malformed(f"{error} is missing or unknown") from error
    except (TypeError, ValueError, AttributeError, cattrs.ForbiddenExtraKeysError) as error:
        raise Malformed(f"{error}") from error


# --- writing ---------------------------------------------------------------------------------


def dump(record: FlightRecord, pause: Callable[[], object] = lambda: None) -> bytes:
    """The record as a gzip file. Equal records give equal bytes.

    pause: called after each LINES_A_PAUSE lines, so that a thread that has better to do gets its turn.
    """
    packer = zlib.compressobj(6, zlib.DEFLATED, _GZIP)
    parts = []
    for number, line in enumerate(lines(record), 1):
        parts.append(packer.compress(line.encode() + b"\n"))
        if number % LINES_A_PAUSE == 0:
            pause()
    return b"".join((*parts, packer.flush()))


def lines(record: FlightRecord) -> Iterator[str]:
    """The file, line by line."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "reason": record.reason,
        "setting": _CONVERTER.unstructure(record.setting),
        "start": _CONVERTER.unstructure(record.start),
        "num_dropped": record.num_dropped,
        "num_entries": len(record.entries),
    }
    entries = (_CONVERTER.unstructure(entry, Entry) for entry in record.entries)
    for line in chain((head,), entries):
        yield json.dumps(line, separators=(",", ":"))


# --- reading ---------------------------------------------------------------------------------


def load(content: bytes) -> FlightRecord:
    """Raises NotAFlightRecord. Of a file that was cut all whole lines are read, and `lost` says so."""
    text, is_cut = _text(content)
    *written, rest = text.split("\n")
    if rest and not is_cut:
        written.append(rest)
    head = _head(written, is_cut)
    is_former = head["version"] == 1
    number, entries = 1, []
    try:
        if is_former:
            head = from_version_1(head)
        setting = from_plain(Setting, with_bounds(head["setting"]))
        start = from_plain(FlightStart | None, head["start"])
        reason, num_dropped = from_plain(str, head["reason"]), from_plain(int, head["num_dropped"])
        num_entries = None if is_former else from_plain(int, head["num_entries"])
        for number, line in enumerate(written[1:], 2):
            if not line.strip():
                continue
            try:
                plain = json.loads(line)
            except (ValueError, RecursionError):
                if number == len(written):  # the last one, cut
                    is_cut = True
                    break
                raise
            entries.append(from_plain(Entry, from_version_1(plain) if is_former else plain))
    except KeyError as error:
        raise NotAFlightRecord(f"line {number}: {error} is missing") from error
    except (Malformed, TypeError, ValueError, RecursionError) as error:
        raise NotAFlightRecord(f"line {number}: {error}") from error
    lost = ""
    if is_cut or (num_entries is not None and len(entries) != num_entries):
        whole = "" if num_entries is None else f" of {num_entries}"
        lost = f"the file was cut off: {len(entries)}{whole} entries can be read"
    return FlightRecord(reason, setting, start, num_dropped, tuple(entries), lost)


def _text(content: bytes) -> tuple[str, bool]:
    """What can be unpacked of a file, and whether its end is missing."""
    is_cut = False
    try:
        if content.startswith(GZIP_MAGIC):
            unpacker = zlib.decompressobj(_GZIP)
            content = unpacker.decompress(content)
            is_cut = not unpacker.eof
        return content.decode(), is_cut
    except (zlib.error, UnicodeDecodeError) as error:
        raise NotAFlightRecord(f"not readable: {error}") from error


def _head(written: list[str], is_cut: bool) -> dict[str, Any]:
    try:
        head = json.loads(written[0]) if written else None
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise NotAFlightRecord(f"{'cut off in its first line, or ' if is_cut else ''}not a {FORMAT}")
    if head.get("version") not in READ_VERSIONS:
        known = " and ".join(map(str, READ_VERSIONS))
        raise NotAFlightRecord(f"version {head.get('version')!r}; this program reads {known}")
    return head
