"""The traces of one JSON object a line: Mooncake, Qwen-Bailian, and recordings of `serve --record`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pageturner.loadtest.traces.columns import MAX_LENGTH, Labels, TraceColumns
from pageturner.loadtest.traces.errors import LineError
from pageturner.loadtest.traces.lines import TraceLines, json_objects

RECORDING_KEY = "pageturner_recording"
"""Only the header of a recording has it."""

STEP_KEY = "step"
"""Only a timed step of a recording has it."""

_BAILIAN_KEY = "chat_id"


@dataclass(frozen=True, slots=True)
class _JsonFormat:
    """block_tokens: tokens of a block that a hash id names. second: of it in the file's unit of time."""

    name: str
    block_tokens: int
    second: float


_MOONCAKE = _JsonFormat("Mooncake", 512, 1e3)
_BAILIAN = _JsonFormat("Qwen-Bailian", 16, 1.0)


def read_json_lines(lines: TraceLines, columns: TraceColumns) -> str:
    """Fill `columns` with every request; the format's name. Raises LineError."""
    known: _JsonFormat | None = None
    for entry in json_objects(lines):
        fields = _Fields(entry, lines.number)
        if known is None:
            known = _format(fields)
            if RECORDING_KEY in entry:
                continue
        elif RECORDING_KEY in entry:
            raise fields.error("", "another recording begins here; its times start anew")
        if STEP_KEY in entry and known.name == "recording":
            continue
        if (_BAILIAN_KEY in entry) != (known is _BAILIAN):
            raise fields.error("", f"is not of the format of the first line, {known.name}")
        _add(fields, known, columns)
    return known.name if known else "nothing"


def _format(fields: _Fields) -> _JsonFormat:
    """By the first object of a file."""
    entry = fields.entry
    if RECORDING_KEY in entry:
        return _JsonFormat("recording", fields.whole("block_size", 1, MAX_LENGTH), 1e3)
    if STEP_KEY in entry:
        raise fields.error("", "is a step of a recording, whose header is missing")
    return _BAILIAN if _BAILIAN_KEY in entry else _MOONCAKE


def _add(fields: _Fields, known: _JsonFormat, columns: TraceColumns) -> None:
    num_prompt = fields.whole("input_length", 0, MAX_LENGTH)
    num_output = fields.whole("output_length", 0, MAX_LENGTH)
    at_seconds = fields.number("timestamp") / known.second
    hash_ids = fields.hash_ids(num_prompt, known)
    if not num_prompt or not num_output:
        columns.num_silent += 1
        return
    labels = Labels(
        tenant=str(fields.entry.get("tenant", "")),
        priority=fields.whole("priority", -(1 << 31), (1 << 31) - 1, default=0),
        deadline_seconds=fields.number_or_none("deadline_seconds"),
        num_choices=fields.whole("num_choices", 1, 1 << 16, default=1),
        max_tokens=fields.whole_or_none("max_tokens", 1, (1 << 32) - 1),
    )
    try:
        columns.add(at_seconds, num_prompt, num_output, hash_ids, known.block_tokens, labels)
    except OverflowError:
        raise fields.error("hash_ids", "an id is not from 0 to 2**64 - 1") from None


@dataclass(frozen=True, slots=True)
class _Fields:
    """One object and its line: fields by name, each of the type asked for or a LineError."""

    entry: Mapping[str, Any]
    line: int

    def error(self, field: str, reason: str) -> LineError:
        return LineError(self.line, field, reason)

    def number(self, name: str) -> float:
        value = self._value(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.error(name, f"{value!r} is not a number")
        try:
            number = float(value)
        except OverflowError:
            raise self.error(name, "the number is beyond the range of a double") from None
        if not math.isfinite(number):
            raise self.error(name, f"{number} is not finite")
        return number

    def number_or_none(self, name: str) -> float | None:
        return None if self.entry.get(name) is None else self.number(name)

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """From `low` to `high`, both included."""
        if default is not None and name not in self.entry:
            return default
        value = self._value(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(name, f"{value!r} is not a whole number")
        if not low <= value <= high:
            raise self.error(name, f"{value} is not from {low} to {high}")
        return value

    def whole_or_none(self, name: str, low: int, high: int) -> int | None:
        return None if self.entry.get(name) is None else self.whole(name, low, high)

    def hash_ids(self, num_prompt: int, known: _JsonFormat) -> list[int]:
        """One for each block of the prompt, with or without the last block where that is not full."""
        ids = self.entry.get("hash_ids") or []
        if not isinstance(ids, list) or not all(type(each) is int for each in ids):
            raise self.error("hash_ids", "is not a list of whole numbers")
        num_full, num_rest = divmod(num_prompt, known.block_tokens)
        if ids and not num_full <= len(ids) <= num_full + bool(num_rest):
            raise self.error(
                "hash_ids",
                f"{len(ids)} ids for {num_prompt} tokens do not fit the blocks of {known.name}, "
                f"which have {known.block_tokens} tokens",
            )
        return ids

    def _value(self, name: str) -> Any:
        if name not in self.entry:
            raise self.error(name, f"is missing; the fields are {', '.join(self.entry) or 'none'}")
        return self.entry[name]
