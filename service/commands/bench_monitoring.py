"""`pageturner bench monitoring`: what metrics, traces and scrapes cost the service."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from pageturner.service.commands.output import write
from pageturner.service.errors import ConfigError

EXAMPLE = "pageturner bench monitoring --steps 2000 --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=int, default=1000, metavar="N", help="to take the median of (default 1000)"
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace) -> int:
    """Print the figures. Raises ConfigError for fewer than one step."""
    from pageturner.service.bench.monitoring import NUM_REQUESTS, measure_monitoring

    if arguments.steps < 1:
        raise ConfigError("--steps", f"{arguments.steps} is below 1")
    cost = measure_monitoring(arguments.steps)
    if arguments.json:
        write(json.dumps(asdict(cost), indent=2))
        return 0
    write(
        "\n".join(
            (
                f"a token, in steps of {NUM_REQUESTS}",
                f"  going round them        {cost.loop_ns:8.0f} ns",
                f"  counting them beside    {cost.metrics_ns:8.0f} ns",
                f"  telling traced phases   {cost.traced_ns:8.0f} ns",
                "a request",
                f"  from acceptance to end  {cost.accept_us:8.1f} us",
                f"a scrape of {cost.text_bytes / 1024:.0f} KiB",
                f"  on the event loop       {cost.scrape_us:8.1f} us",
                f"  beside it, in a thread  {cost.text_ms:8.1f} ms",
            )
        )
    )
    return 0
