"""`pageturner bench fleet`: coarse servers beside the scheduler, and how many requests a second they run."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from pageturner.service.commands.output import show, write
from pageturner.service.commands.progress import progress

if TYPE_CHECKING:
    from pageturner.service.bench.fleet import FleetReport

EXAMPLE = "pageturner bench fleet --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace) -> int:
    """Print the figures."""
    from pageturner.service.bench.fleet import NUM_PARTS, measure_fleet

    with progress(NUM_PARTS) as advance:
        report = measure_fleet(lambda text: advance(text, 1))
    if arguments.json:
        write(json.dumps(to_json(report), indent=2))
        return 0
    _show(report)
    return 0


def to_json(report: FleetReport) -> dict[str, Any]:
    """As `--json` has it."""
    return {
        "comparisons": [
            {
                "setting": found.setting,
                "requests": found.num_requests,
                "chunks": {
                    str(chunk): {
                        "scheduler": dict(found.scheduler[chunk].figures),
                        "coarse": dict(side.figures),
                        "errors": found.errors(chunk),
                        "scheduler_requests_per_second": found.scheduler[chunk].requests_per_second,
                        "coarse_requests_per_second": side.requests_per_second,
                    }
                    for chunk, side in found.coarse.items()
                },
            }
            for found in report.comparisons
        ],
        "speed": dict(report.speed),
    }


def _show(report: FleetReport) -> None:
    from rich.table import Table

    from pageturner.service.bench.fleet import JUDGED, SPEED_SERVERS
    from pageturner.service.simulator.figures import METRIC

    table = Table(title="coarse servers less the scheduler, in % of it (hits: in points)")
    for column in ("setting", "chunk", *(METRIC[name].title for name in JUDGED), "x as fast"):
        table.add_column(column, justify="left" if column == "setting" else "right", overflow="fold")
    for found in report.comparisons:
        for chunk, side in found.coarse.items():
            errors = [f"{100 * error:+.2f}" for error in found.errors(chunk).values()]
            ratio = side.requests_per_second / found.scheduler[chunk].requests_per_second
            table.add_row(found.setting, str(chunk), *errors, f"{ratio:.0f}")
    show(table)
    for name, speed in report.speed.items():
        write(f"{name:14}{speed:8.0f} requests/s on {SPEED_SERVERS} coarse servers, one core")
