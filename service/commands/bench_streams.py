"""`pageturner bench streams`: thousands of streams at once, none of them lost."""

from __future__ import annotations

import argparse
import json

from pageturner.service.commands.counts import add_counts
from pageturner.service.commands.output import write
from pageturner.service.commands.progress import progress
from pageturner.service.config import cache_directory
from pageturner.service.errors import ConfigError

EXAMPLE = "pageturner bench streams --streams 2000 --connections 500 --unread 100"
_MOST_STREAMS = 16384


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_counts(
        parser,
        ("streams", 2000, "streams that are open at once"),
        ("unread", 0, "streams beside them whose clients hang and read nothing"),
        ("connections", 500, "connections that they are spread over"),
        ("client-processes", 2, "processes that make them"),
        ("output-tokens", 64, "tokens of each answer"),
    )
    parser.add_argument(
        "--step-ms", type=float, default=50.0, metavar="X", help="time of a step of the model (default 50)"
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    parser.set_defaults(measure=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the figures; 1 if a stream was lost. Raises ConfigError for what is out of bounds."""
    from pageturner.service.bench.streams import StreamsPlan, document, measure_streams

    _check(arguments)
    plan = StreamsPlan(
        arguments.streams,
        arguments.unread,
        arguments.connections,
        arguments.client_processes,
        arguments.output_tokens,
        arguments.step_ms / 1000,
    )
    with progress(2) as advance:
        result = measure_streams(plan, cache_directory(), lambda text: advance(text, 1))
    if arguments.json:
        write(json.dumps(document(result), indent=2))
        return 0 if result.is_without_loss else 1
    faults = sum(result.faults.values())
    opening, reading, ending = result.seconds
    write(
        f"{plan.streams} streams over {plan.connections} connections, all open after {opening:.1f} s: "
        f"{result.whole} ended once and whole {reading:.1f} s later, {faults} otherwise"
    )
    for fault, count in sorted(result.faults.items()):
        write(f"  {count} x {fault}")
    if plan.unread:
        write(f"{plan.unread} beside them were never read; {ending:.1f} s later {result.num_left} were left")
    megabytes = [usage.resident_bytes / 1e6 for usage in (result.before, result.open, result.after)]
    write(
        f"server: {megabytes[0]:.0f} MB before, {megabytes[1]:.0f} with all open, "
        f"{result.after.most_resident_bytes / 1e6:.0f} at most, {megabytes[2]:.0f} after; open files "
        f"{result.before.descriptors}, {result.open.descriptors}, {result.after.descriptors}"
    )
    return 0 if result.is_without_loss else 1


def _check(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for the first that is out of bounds."""
    for name in ("streams", "connections", "client_processes", "output_tokens"):
        value = getattr(arguments, name)
        if not 1 <= value <= _MOST_STREAMS:
            raise ConfigError(f"--{name.replace('_', '-')}", f"{value} is not in [1, {_MOST_STREAMS}]")
    if not 0 <= arguments.unread <= _MOST_STREAMS:
        raise ConfigError("--unread", f"{arguments.unread} is not in [0, {_MOST_STREAMS}]")
    if not 0 <= arguments.step_ms < 60_000:
        raise ConfigError("--step-ms", f"{arguments.step_ms} is not in [0, 60000)")
