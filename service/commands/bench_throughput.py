"""`pageturner bench throughput`: output tokens/s of the service beside transformers' generate()."""

from __future__ import annotations

import argparse
import dataclasses
import json

from pageturner.service.commands.counts import add_counts, check_counts
from pageturner.service.commands.flags import add_config_flags, config_arguments, load_from
from pageturner.service.commands.output import write
from pageturner.service.commands.progress import progress
from pageturner.service.config import cache_directory

EXAMPLE = "pageturner bench throughput --concurrency 16 --dtype bfloat16 --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_counts(
        parser,
        ("concurrency", 16, "requests at once, and generate()'s batch"),
        ("prompt-tokens", 128, "tokens of each prompt"),
        ("output-tokens", 128, "tokens of each output"),
        ("rounds", 3, "rounds of each contender, in turns"),
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    add_config_flags(parser)
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace) -> int:
    """Print the figures. Raises ConfigError for a count below 1."""
    from pageturner.service.bench.throughput import ThroughputLoad, measure_throughput

    check_counts(arguments, "concurrency", "prompt_tokens", "output_tokens", "rounds")
    workload = ThroughputLoad(arguments.concurrency, arguments.prompt_tokens, arguments.output_tokens)
    model = load_from(arguments).config.model
    with progress(arguments.rounds) as advance:
        result = measure_throughput(
            workload,
            arguments.rounds,
            model,
            cache_directory(),
            config_arguments(arguments),
            lambda text: advance(text, 1),
        )
    if arguments.json:
        write(json.dumps({**dataclasses.asdict(result), **result.medians()}, indent=2))
        return 0
    medians = result.medians()
    write(
        f"output tokens/s, median of {arguments.rounds} rounds in turns: "
        f"pageturner {medians['service_tokens_per_second']:.1f}, "
        f"transformers {medians['baseline_tokens_per_second']:.1f}, ratio {medians['ratio']:.2f}"
    )
    return 0
