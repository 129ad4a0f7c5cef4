"""`pageturner bench startup`: from process start to SERVING, and the parts of that time."""

from __future__ import annotations

import argparse
import dataclasses
import json

from pageturner.service.commands.counts import add_counts, check_counts
from pageturner.service.commands.flags import add_config_flags, config_arguments
from pageturner.service.commands.output import write
from pageturner.service.commands.progress import progress

EXAMPLE = "pageturner bench startup --runs 5 --verbose"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_counts(parser, ("runs", 5, "runs to take the median of"))
    parser.add_argument("--verbose", action="store_true", help="the time of each part of the start too")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    add_config_flags(parser)
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace) -> int:
    """Print the figures. Raises ConfigError for fewer than one run."""
    from pageturner.service.bench.startup import measure_startup

    check_counts(arguments, "runs")
    with progress(arguments.runs + 1) as advance:
        result = measure_startup(arguments.runs, config_arguments(arguments), lambda text: advance(text, 1))
    if arguments.json:
        medians = {"median_seconds": result.median_seconds, "median_parts": result.median_parts()}
        write(json.dumps({**dataclasses.asdict(result), **medians}, indent=2))
        return 0
    runs = ", ".join(f"{seconds:.2f}" for seconds in result.seconds)
    write(f"process start to SERVING: {result.median_seconds:.2f} s, the median of {runs}")
    write(f"(a first start, not counted, took {result.first_seconds:.2f} s)")
    if arguments.verbose:
        for name, seconds in result.median_parts().items():
            write(f"{seconds:7.3f} s  {name}")
    return 0
