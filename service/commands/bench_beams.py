"""`pageturner bench beams`: what a beam search costs beside samples, and beside one answer."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from pageturner.service.commands.counts import add_counts
from pageturner.service.commands.flags import add_config_flags, config_arguments
from pageturner.service.commands.output import write
from pageturner.service.commands.progress import progress
from pageturner.service.errors import ConfigError

if TYPE_CHECKING:
    from pageturner.service.bench.beams import BeamResult

EXAMPLE = "pageturner bench beams --width 4 --concurrency 4 --json"

_SAID = {
    "one": "one greedy answer",
    "samples": "as many samples",
    "beams": "beams",
    "stops": "with 1,024 stop tokens",
    "form": "of a form",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_counts(
        parser,
        ("concurrency", 4, "requests at once"),
        ("width", 4, "beams of each search, and samples of each request that samples"),
        ("output-tokens", 64, "tokens of each answer"),
        ("rounds", 5, "rounds of each kind of request, in turns"),
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    add_config_flags(parser)
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace) -> int:
    """Print the figures. Raises ConfigError for a number that is too small, PageturnerError if a request
    fails."""
    from pageturner.service.bench.beams import BeamLoad, measure_beams

    for name, least in (("concurrency", 1), ("width", 2), ("output_tokens", 1), ("rounds", 1)):
        if (value := getattr(arguments, name)) < least:
            raise ConfigError(f"--{name.replace('_', '-')}", f"{value} is below {least}")
    load = BeamLoad(arguments.concurrency, arguments.width, arguments.output_tokens)
    with progress(arguments.rounds) as advance:
        result = measure_beams(
            load, arguments.rounds, config_arguments(arguments), lambda text: advance(text, 1)
        )
    if arguments.json:
        rates = {contender.name: result.rate(contender) for contender in result.contenders}
        write(json.dumps({**asdict(result), "tokens_per_second": rates}, indent=2))
        return 0
    write("\n".join(lines(result)))
    return 0


def lines(result: BeamResult) -> Iterator[str]:
    """The figures in words."""
    load = result.load
    yield (
        f"tokens/s of all rows, {load.num_requests} requests at once, width {load.width}, "
        f"{load.output_tokens} tokens each; medians of rounds in turns"
    )
    for contender in result.contenders:
        beside = f", {result.ratio(contender.name, 'samples'):.2f} of the samples'"
        yield (
            f"{_SAID[contender.name]:23}{result.rate(contender):8.1f}{beside}; "
            f"{contender.median / result.contenders[0].median:.2f} x the time of one answer"
        )
    yield (
        f"beams save {result.saved:.1%} of their blocks by sharing, and copy {result.num_copies:.2f} blocks "
        "a token"
    )
