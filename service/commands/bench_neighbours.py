"""`pageturner bench neighbours`: what a busy program on the same cores costs the service."""

from __future__ import annotations

import argparse
import dataclasses
import json

from pageturner.service.commands.counts import add_counts, check_counts
from pageturner.service.commands.flags import add_config_flags, config_arguments
from pageturner.service.commands.output import write
from pageturner.service.commands.progress import progress

EXAMPLE = "pageturner bench neighbours --concurrency 1 --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_counts(
        parser,
        ("concurrency", 1, "requests at once"),
        ("prompt-tokens", 128, "tokens of each prompt"),
        ("output-tokens", 128, "tokens of each output"),
        ("rounds", 3, "rounds of each kind, in turns"),
        ("neighbours", 1, "busy programs beside the service"),
        ("idle-seconds", 5, "seconds without requests at the end"),
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    add_config_flags(parser)
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace) -> int:
    """Print the figures. Raises ConfigError for a count below 1, PageturnerError if a request failed."""
    from pageturner.service.bench.neighbours import measure_neighbours
    from pageturner.service.bench.throughput import ThroughputLoad

    check_counts(
        arguments, "concurrency", "prompt_tokens", "output_tokens", "rounds", "neighbours", "idle_seconds"
    )
    workload = ThroughputLoad(arguments.concurrency, arguments.prompt_tokens, arguments.output_tokens)
    with progress(arguments.rounds + 1) as advance:
        result = measure_neighbours(
            workload,
            arguments.rounds,
            arguments.neighbours,
            arguments.idle_seconds,
            config_arguments(arguments),
            lambda text: advance(text, 1),
        )
    medians = result.medians()
    if arguments.json:
        write(json.dumps({**dataclasses.asdict(result), **medians}, indent=2))
        return 0
    write(
        f"output tokens/s, median of {arguments.rounds} rounds in turns: "
        f"{medians['quiet_tokens_per_second']:.1f} alone, "
        f"{medians['beside_tokens_per_second']:.1f} beside {arguments.neighbours} busy, "
        f"ratio {medians['ratio']:.2f}; idle {result.idle_core_share:.2%} of a core"
    )
    return 0
