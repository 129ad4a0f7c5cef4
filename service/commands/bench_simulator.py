"""`pageturner bench simulator`: how many scheduled tokens a second one core simulates."""

from __future__ import annotations

import argparse
import dataclasses
import json

from pageturner.service.commands.output import write
from pageturner.service.commands.progress import progress

EXAMPLE = "pageturner bench simulator --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace) -> int:
    """Print the figures."""
    from pageturner.service.bench.simulator import MIXES, measure_simulator

    with progress(len(MIXES)) as advance:
        results = measure_simulator(lambda name: advance(f"simulated {name}", 1))
    if arguments.json:
        rows = [{**dataclasses.asdict(r), "tokens_per_second": r.tokens_per_second} for r in results]
        write(json.dumps(rows, indent=2))
        return 0
    for result in results:
        write(
            f"{result.mix:<9}{result.tokens_per_second:10,.0f} scheduled tokens/s of one core, "
            f"{result.num_running:.0f} requests running"
        )
    return 0
