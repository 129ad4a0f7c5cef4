"""The CSV traces: BurstGPT and Azure LLM, as published or as written again by pandas, R or Excel."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pageturner.loadtest.traces.columns import MAX_LENGTH, TraceColumns
from pageturner.loadtest.traces.errors import LineError
from pageturner.loadtest.traces.lines import TraceLines

Clock = Callable[[str], float]
"""Seconds of a cell, counted from any origin. Raises ValueError, which says what is wrong."""


def read_csv(lines: TraceLines, columns: TraceColumns) -> str:
    """Fill `columns` with every request; the format's name. Raises LineError."""
    rows = csv.reader(lines)
    try:
        header = [name.strip() for name in next(rows, [])]
        layout = _layout(header, lines.number)
        _read_rows(rows, lines, layout, columns)
    except csv.Error as error:
        raise LineError(lines.number, "", str(error)) from error
    return layout.format.name


@dataclass(frozen=True, slots=True)
class _CsvFormat:
    """Names of the columns that count, and how a moment is read; clock: one for each file."""

    name: str
    moment: str
    prompt: str
    output: str
    clock: Callable[[], Clock]

    @property
    def needed(self) -> tuple[str, str, str]:
        return self.moment, self.prompt, self.output


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where a file has the columns of its format. places: of moment, prompt and output in a row."""

    format: _CsvFormat
    header: Sequence[str]
    places: tuple[int, int, int]


def _layout(header: list[str], line: int) -> _Layout:
    for known in _FORMATS:
        if set(known.needed) <= set(header):
            moment, prompt, output = (header.index(name) for name in known.needed)
            return _Layout(known, header, (moment, prompt, output))
    if not header:
        raise LineError(max(1, line), "", "the file is empty, so its format is none that is known")
    found = ", ".join(repr(name) for name in header[:12])
    wanted = "; ".join(f"{known.name} has {', '.join(known.needed)}" for known in _FORMATS)
    separator = next((mark for mark in ";\t|" if len(header) == 1 and mark in header[0]), None)
    hint = f" (columns must be separated by commas, not by {separator!r})" if separator else ""
    raise LineError(
        line,
        "",
        f"the format is none of BurstGPT, Azure LLM, Mooncake, Qwen-Bailian or a recording: "
        f"the columns found are {found}{hint}; {wanted}",
    )


def _read_rows(rows: Iterator[list[str]], lines: TraceLines, layout: _Layout, columns: TraceColumns) -> None:
    width, (moment, prompt, output) = len(layout.header), layout.places
    seconds_of = layout.format.clock()
    add = columns.add_lengths
    line_before = lines.number
    for row in rows:
        if not row or (len(row) == 1 and not row[0].strip()):
            line_before = lines.number
            continue
        try:
            if len(row) != width or lines.number != line_before + 1:
                raise ValueError("the row is not as wide as the header")
            at_seconds = seconds_of(row[moment])
            num_prompt, num_output = int(row[prompt]), int(row[output])
            if not (0 <= num_prompt <= MAX_LENGTH and 0 <= num_output <= MAX_LENGTH):
                raise ValueError("a length is out of range")
        except ValueError:
            # Once more and slowly: 472.0 for 472 is read, and a mistake is told with its column.
            try:
                if lines.number != line_before + 1:
                    raise LineError(line_before + 1, "", "a quotation mark is not closed") from None
                at_seconds, num_prompt, num_output = _read_row(row, lines.number, layout, seconds_of)
            except LineError:
                if lines.is_cut and lines.number == line_before + 1:
                    lines.leave_out_cut_line()
                    return
                raise
        line_before = lines.number
        if num_prompt and num_output:
            add(at_seconds, num_prompt, num_output)
        else:
            columns.num_silent += 1


def _read_row(row: Sequence[str], line: int, layout: _Layout, seconds_of: Clock) -> tuple[float, int, int]:
    """Raises LineError."""
    if len(row) != len(layout.header):
        raise LineError(line, "", f"has {len(row)} columns, the header {len(layout.header)}")
    moment, prompt, output = layout.places
    try:
        at_seconds = seconds_of(row[moment])
    except ValueError as error:
        raise LineError(line, layout.format.moment, str(error)) from error
    return (
        at_seconds,
        _length(row[prompt], line, layout.format.prompt),
        _length(row[output], line, layout.format.output),
    )


def _length(cell: str, line: int, column: str) -> int:
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise LineError(line, column, f"{cell!r} is not a whole number")
    if not 0 <= number <= MAX_LENGTH:
        raise LineError(line, column, f"{cell} is not from 0 to {MAX_LENGTH} tokens")
    return int(number)


def _plain_seconds() -> Clock:
    def seconds_of(cell: str) -> float:
        try:
            seconds = float(cell)
        except ValueError:
            seconds = math.nan
        if not math.isfinite(seconds):
            raise ValueError(f"{cell!r} is not a number of seconds")
        return seconds

    return seconds_of


_MOMENT = re.compile(
    r"\s*(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d(?::\d\d)?)(?:[.,](\d+))?\s*(Z|UTC|[+-]\d\d(?::?\d\d)?)?\s*",
    re.IGNORECASE,
)


def _date_and_time() -> Clock:
    """Of 2023-11-16 18:15:46.6805900, 2024-05-10T00:00:00Z or 2024-05-10 00:00:00.00993+00:00; else UTC.

    Counted from the first one, since a double that counts from 1970 has no seventh digit.
    """
    origin: datetime | None = None

    def seconds_of(cell: str) -> float:
        nonlocal origin
        found = _MOMENT.fullmatch(cell)
        if found is None:
            raise ValueError(f"{cell!r} is not a date and time such as 2024-05-10 00:00:00.5+00:00")
        date, time, digits, zone = found.groups()
        if zone is None or zone.upper() in ("Z", "UTC"):
            moment = datetime.fromisoformat(f"{date}T{time}").replace(tzinfo=UTC)
        else:
            moment = datetime.fromisoformat(f"{date}T{time}{zone}")
        if origin is None:
            origin = moment
        return (moment - origin).total_seconds() + (float(f"0.{digits}") if digits else 0.0)

    return seconds_of


_FORMATS = (
    _CsvFormat("BurstGPT", "Timestamp", "Request tokens", "Response tokens", _plain_seconds),
    _CsvFormat("Azure LLM", "TIMESTAMP", "ContextTokens", "GeneratedTokens", _date_and_time),
)
