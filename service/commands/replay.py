"""`pageturner replay`: a flight record again through the real scheduler, every decision compared."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pageturner.service.commands.flight import read
from pageturner.service.commands.output import write
from pageturner.service.flight.flight_file import to_plain
from pageturner.service.flight.records import FlightRecord, Scheduled, unpack_rows
from pageturner.service.flight.replay import Difference, replay

HELP = "run a flight record again and compare every decision"
EXAMPLE = "pageturner replay flight.jsonl.gz"
EXIT_DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="a flight record")
    parser.add_argument("--json", action="store_true", help="the same as JSON")


def run(arguments: argparse.Namespace) -> int:
    record = read(arguments.file)
    result = replay(record)
    difference = result.difference
    if arguments.json:
        document = {
            "reason": record.reason,
            "num_steps": result.num_steps,
            "num_entries": result.num_entries,
            "num_dropped": record.num_dropped,
            "is_equal": difference is None,
            "difference": None if difference is None else to_plain(difference),
        }
        write(json.dumps(document, indent=2))
    elif difference is None:
        write(f"{_described(record)}: {result.num_steps} steps replayed, all equal")
    else:
        write(_shown(record, difference))
    return 0 if difference is None else EXIT_DIFFERENT


def _described(record: FlightRecord) -> str:
    is_whole = record.start is not None and record.start.checkpoint is None
    begin = "from the start of the engine" if is_whole else "from a checkpoint"
    return f"{record.reason}, {begin}"


def _shown(record: FlightRecord, difference: Difference) -> str:
    recorded, replayed = difference.recorded, difference.replayed
    lines = [f"{_described(record)}: entry {difference.index + 1}, at step {difference.step_id}, differs:"]
    for name in recorded.__slots__:
        was, now = getattr(recorded, name), getattr(replayed, name)
        if was == now:
            continue
        if name == "rows" and isinstance(recorded, Scheduled):
            was, now = unpack_rows(was), unpack_rows(now)
        if isinstance(was, (tuple, list)):
            lines += [f"  - {part}" for part in was if part not in now]
            lines += [f"  + {part}" for part in now if part not in was]
        else:
            lines += [f"  - {name} {was}", f"  + {name} {now}"]
    lines.append("(- recorded, + replayed)")
    return "\n".join(lines)
