"""Traces of real traffic, in the formats in which they are published.

BurstGPT      CSV: Timestamp (seconds), Model, Request tokens, Response tokens, Total tokens, Log Type
Azure LLM     CSV: TIMESTAMP (date and time), ContextTokens, GeneratedTokens (2023 and 2024 alike)
Mooncake      JSONL: timestamp (milliseconds), input_length, output_length, hash_ids (blocks of 512 tokens)
Qwen-Bailian  JSONL: chat_id, timestamp (seconds), and Mooncake's other fields (blocks of 16 tokens)
recording     JSONL of `serve --record`: a header, then Mooncake's fields, tenant, priority and more

hash_ids name a block and all before it, so equal ids are equal prompts up to there, and become equal
token ids. How many there are must fit the length at the format's block size, in every line: else the blocks
are of another size, and what prompts share would be misread. Requests of the CSV formats share nothing.
"""

from __future__ import annotations

from pathlib import Path

from pageturner.loadtest.traces.columns import TraceColumns
from pageturner.loadtest.traces.csv_traces import read_csv
from pageturner.loadtest.traces.errors import LineError, TraceError
from pageturner.loadtest.traces.json_traces import read_json_lines
from pageturner.loadtest.traces.lines import OnBytes, ignore_bytes, open_lines
from pageturner.loadtest.traces.trace import Trace


def read_trace(path: Path, on_bytes: OnBytes = ignore_bytes) -> Trace:
    """Every request of a file whose first line tells its format, gzip or not; the file is read once.

    Requests that generated nothing (they failed when the trace was taken) are left out and counted in the
    notes. Raises TraceError, which names the line and the column or field.
    """
    columns = TraceColumns()
    try:
        with open_lines(path, on_bytes) as lines:
            is_json = lines.peek().lstrip().startswith("{")
            format_name = (read_json_lines if is_json else read_csv)(lines, columns)
            notes = lines.notes
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except LineError as error:
        raise TraceError(f"{path}, {error}") from error
    if columns.num_silent:
        total = columns.num_silent + len(columns.at_seconds)
        notes.append(f"{columns.num_silent:,} of {total:,} requests generated nothing and are left out")
    if not columns.at_seconds:
        raise TraceError(f"{path} has no requests{''.join(f'; {note}' for note in notes)}")
    return Trace(path.name, format_name, columns, notes)
