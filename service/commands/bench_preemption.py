"""`pageturner bench preemption`: whether a pool far too small changes any token."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math

from pageturner.service.commands.counts import add_counts, check_counts
from pageturner.service.commands.flags import add_config_flags, config_arguments
from pageturner.service.commands.output import write
from pageturner.service.commands.progress import progress
from pageturner.service.errors import ConfigError

EXAMPLE = "pageturner bench preemption --dtype float32 --deterministic true --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_counts(
        parser,
        ("requests", 32, "requests at once"),
        ("prompt-tokens", 40, "tokens of each prompt"),
        ("output-tokens", 160, "tokens of each output"),
        ("tiny-blocks", 64, "blocks of the tiny pool"),
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="of every request, seeded (default 0)"
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    add_config_flags(parser)
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace) -> int:
    """Print the figures. Raises ConfigError for a number out of bounds."""
    from pageturner.service.bench.preemption import TOLERANCE, PreemptionLoad, compare_policies

    check_counts(arguments, "requests", "prompt_tokens", "output_tokens", "tiny_blocks")
    if not 0 <= arguments.temperature < math.inf:
        raise ConfigError("--temperature", f"{arguments.temperature} is not a number from 0")
    workload = PreemptionLoad(
        arguments.requests, arguments.prompt_tokens, arguments.output_tokens, arguments.temperature
    )
    reclaims = ("always-swap", "always-recompute", "cost-model")
    with progress(1 + len(reclaims)) as advance:
        results = compare_policies(
            workload,
            reclaims,
            arguments.tiny_blocks,
            config_arguments(arguments),
            lambda text: advance(text, 1),
        )
    if arguments.json:
        write(json.dumps([dataclasses.asdict(result) for result in results], indent=2))
        return 0
    for result in results:
        write(
            f"{result.reclaim}: {result.num_equal} of {result.num_streams} streams equal, "
            f"{result.num_compatible} within {TOLERANCE} at the first difference "
            f"(largest {result.largest_gap:.3f}); {result.num_swaps} swaps, "
            f"{result.num_recomputes} recomputes, {result.num_tail_reclaims} tail reclaims; "
            f"{result.num_blocks_left} blocks left in use"
        )
    return 0
