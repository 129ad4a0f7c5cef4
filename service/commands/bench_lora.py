"""`pageturner bench lora`: throughput with adapters in the batch against none."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from pageturner.service.commands.flags import add_config_flags, config_arguments, load_from
from pageturner.service.commands.output import write, write_json
from pageturner.service.commands.progress import progress
from pageturner.service.config import cache_directory
from pageturner.service.errors import ConfigError

EXAMPLE = "pageturner bench lora --adapters 8 --ranks 8,16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, default, doc in (
        ("concurrency", 16, "requests at once"),
        ("prompt-tokens", 128, "tokens of each prompt"),
        ("output-tokens", 128, "tokens of each output"),
        ("adapters", 8, "adapters that the requests of a round have in turn"),
        ("rounds", 3, "rounds of each contender, in turns"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{doc} (default {default})"
        )
    parser.add_argument(
        "--ranks",
        type=lambda text: tuple(map(int, text.split(","))),
        default=(8, 16),
        metavar="N,...",
        help="of adapters of all modules, each rank a contender (default 8,16)",
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    add_config_flags(parser)
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace) -> int:
    """Print the figures. Raises ConfigError for a count below 1."""
    from pageturner.service.bench.lora import LoraLoad, measure_lora

    for name in ("concurrency", "prompt_tokens", "output_tokens", "adapters", "rounds"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}", f"{getattr(arguments, name)} is below 1")
    if min(arguments.ranks) < 1:
        raise ConfigError("--ranks", f"{min(arguments.ranks)} is below 1")
    load = LoraLoad(
        arguments.concurrency,
        arguments.prompt_tokens,
        arguments.output_tokens,
        arguments.adapters,
        arguments.ranks,
    )
    with progress(arguments.rounds) as advance:
        result = measure_lora(
            load,
            arguments.rounds,
            load_from(arguments).config.model,
            cache_directory(),
            config_arguments(arguments),
            lambda text: advance(text, 1),
        )
    ratios = result.ratios()
    if arguments.json:
        write_json({**asdict(result), "ratios": ratios})
        return 0
    for name, figures in result.rounds.items():
        write(
            f"{name:<26}{sorted(figures)[len(figures) // 2]:8.1f} output tokens/s, ratio {ratios[name]:.2f}"
        )
    return 0
