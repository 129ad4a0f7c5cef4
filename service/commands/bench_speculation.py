"""`pageturner bench speculation`: what guessing ahead is worth, and what it costs where nothing repeats."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from pageturner.service.commands.counts import add_counts, check_counts
from pageturner.service.commands.flags import add_config_flags, config_arguments
from pageturner.service.commands.output import write
from pageturner.service.commands.progress import progress
from pageturner.service.errors import ConfigError

if TYPE_CHECKING:
    from pageturner.service.bench.speculation import SpeculationResult

EXAMPLE = "pageturner bench speculation --concurrency 1,16 --rounds 6 --json"
KINDS = ("quote", "story")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--concurrency", default="1,16", metavar="N,...", help="requests at once (default 1,16)"
    )
    add_counts(
        parser,
        ("output-tokens", 128, "tokens of each answer"),
        ("rounds", 5, "rounds of each server, in turns"),
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    add_config_flags(parser)
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace) -> int:
    """Print the figures. Raises ConfigError for a number below 1, PageturnerError if a server fails."""
    from pageturner.service.bench.speculation import SpeculationLoad, measure_speculation

    check_counts(arguments, "output_tokens", "rounds")
    counts = [_count(part) for part in arguments.concurrency.split(",")]
    loads = [SpeculationLoad(kind, count, arguments.output_tokens) for count in counts for kind in KINDS]
    with progress(len(loads)) as advance:
        results = measure_speculation(
            loads, arguments.rounds, config_arguments(arguments), lambda text: advance(text, 1)
        )
    if arguments.json:
        write(json.dumps([{**asdict(result), "ratio": result.ratio} for result in results], indent=2))
        return 0
    write("\n".join(lines(results)))
    return 0


def lines(results: tuple[SpeculationResult, ...]) -> Iterator[str]:
    """The figures in words."""
    yield "output tokens/s, medians of rounds in turns: without guesses, with them"
    for result in results:
        load = result.load
        share = result.num_accepted / result.num_drafted if result.num_drafted else 0.0
        yield (
            f"{load.kind:6}{load.num_requests:4} at once: {statistics.median(result.plain):7.1f} "
            f"{statistics.median(result.drafting):7.1f}, ratio {result.ratio:.2f}; "
            f"{result.num_accepted} of {result.num_drafted} guesses came true ({share:.0%}); "
            f"{result.num_equal} of {load.num_requests} answers the same"
        )


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        raise ConfigError("--concurrency", f"{text!r} is no number") from None
    if count < 1:
        raise ConfigError("--concurrency", f"{count} is below 1")
    return count
