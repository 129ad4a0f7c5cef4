"""`pageturner bench products`: matrix products of one step, quantised and not, on this CPU."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from pageturner.service.commands.output import write
from pageturner.service.commands.progress import progress
from pageturner.service.config import cache_directory
from pageturner.service.errors import ConfigError, PageturnerError

EXAMPLE = "pageturner bench products --rows 1,16,64"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rows", type=_numbers, metavar="N,...", help="of a step (default 1,4,16,64,512), each on its own"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="steps of each contender, in turns (default 5)"
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace) -> int:
    """Print the figures. Raises ConfigError for a count below 1, PageturnerError without a compiler."""
    from pageturner.kernels.errors import CompilerUnavailable
    from pageturner.service.bench.products import ROWS, measure_products, product_lines

    rows = arguments.rows or ROWS
    for name, least in (("rows", min(rows)), ("rounds", arguments.rounds)):
        if least < 1:
            raise ConfigError(f"--{name}", f"{least} is below 1")
    with progress(len(rows)) as advance:
        try:
            timings = measure_products(
                cache_directory(), rows, arguments.rounds, lambda text: advance(text, 1)
            )
        except CompilerUnavailable as reason:
            raise PageturnerError(f"nothing to measure: {reason}") from reason
    if arguments.json:
        write(json.dumps([asdict(timing) for timing in timings], indent=2))
        return 0
    for line in product_lines(timings):
        write(line)
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))
