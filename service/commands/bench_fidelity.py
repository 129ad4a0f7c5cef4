"""`pageturner bench fidelity`: simulated servers beside real ones."""

from __future__ import annotations

import argparse
import dataclasses
import json

from pageturner.service.commands.flags import add_config_flags, config_arguments
from pageturner.service.commands.output import note, write
from pageturner.service.commands.progress import progress

EXAMPLE = "pageturner bench fidelity --num-threads 1 --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    add_config_flags(parser)
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace) -> int:
    """Print the figures."""
    from pageturner.service.bench.fidelity import FIDELITY_WORK, measure_fidelity

    with progress(FIDELITY_WORK) as advance:
        report = measure_fidelity(config_arguments(arguments), advance)
    for text in report.calibration.warnings:
        note(f"warning: {text}")
    if arguments.json:
        document = {
            "fit_error": dataclasses.asdict(report.calibration.error),
            "results": [
                {**dataclasses.asdict(r), "errors": r.errors, "errors_at_speed": r.errors_at_speed}
                for r in report.results
            ],
            "mean_errors": report.mean_errors,
            "mean_errors_at_speed": report.mean_errors_at_speed,
        }
        write(json.dumps(document, indent=2))
        return 0
    for result in report.results:
        write(f"{result.policies}, {result.load.requests} requests, {result.load.concurrency} at once")
        sides = (("real", result.real), ("simulated", result.simulated), ("at speed", result.at_speed))
        for side, found in sides:
            write(
                f"  {side:<10}{found.throughput:8.1f} tokens/s, TTFT p50 {found.ttft_p50:.2f} s, "
                f"p99 {found.ttft_p99:.2f} s; {found.num_swaps} swaps, {found.num_recomputes} recomputes, "
                f"{found.num_tail_reclaims} tail reclaims"
            )
        write(f"  (its steps took {result.slowdown:.2f} times as long as when they were calibrated)")
    for title, errors in (("", report.mean_errors), (" at speed", report.mean_errors_at_speed)):
        write(f"mean errors{title}: " + ", ".join(f"{name} {error:.1%}" for name, error in errors.items()))
    return 0
