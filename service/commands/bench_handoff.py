"""`pageturner bench handoff`: prefill and decode apart, beside one server on the same processors."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics

from pageturner.service.commands.flags import add_config_flags, config_arguments
from pageturner.service.commands.output import write
from pageturner.service.commands.progress import progress
from pageturner.service.errors import ConfigError

EXAMPLE = "pageturner bench handoff --streams 8 --prompt-tokens 1024 --rounds 3 --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, default, doc in (
        ("streams", 8, "streams that decode without end"),
        ("prompts", 8, "long prompts of a round, a second apart"),
        ("prompt-tokens", 1024, "tokens of each"),
        ("rounds", 3, "rounds of each arrangement, in turns"),
        ("threads", len(os.sched_getaffinity(0)), "threads that both arrangements have"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{doc} (default {default})"
        )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    add_config_flags(parser)
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace) -> int:
    """Print the figures. Raises ConfigError for a count below 1, PageturnerError if a server failed."""
    from pageturner.service.bench.handoff import ARRANGEMENTS, HandoffLoad, measure_handoff

    for name in ("streams", "prompts", "prompt_tokens", "rounds", "threads"):
        if (value := getattr(arguments, name)) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}", f"{value} is below 1")
    load = HandoffLoad(arguments.streams, arguments.prompts, arguments.prompt_tokens)
    with progress(arguments.rounds * len(ARRANGEMENTS)) as advance:
        found = measure_handoff(
            load,
            arguments.rounds,
            arguments.threads,
            config_arguments(arguments),
            lambda text: advance(text, 1),
        )
    medians = {
        name: {
            field.name: statistics.median(getattr(each, field.name) for each in rounds)
            for field in dataclasses.fields(rounds[0])
        }
        for name, rounds in found.items()
    }
    if arguments.json:
        rounds = {name: list(map(dataclasses.asdict, each)) for name, each in found.items()}
        write(json.dumps({"load": dataclasses.asdict(load), "medians": medians, "rounds": rounds}, indent=2))
    else:
        write("\n".join(_in_words(name, each) for name, each in medians.items()))
    return 0


def _in_words(name: str, figures: dict[str, float]) -> str:
    p50, p99, longest = (figures[f"gap_{which}"] * 1000 for which in ("p50", "p99", "max"))
    return (
        f"{name}: between two tokens p50 {p50:.0f}, p99 {p99:.0f}, at most {longest:.0f} ms; "
        f"streams {figures['tokens_per_second']:.1f} tokens/s; first token of a long prompt "
        f"p50 {figures['first_token_p50']:.2f}, p99 {figures['first_token_p99']:.2f} s; "
        f"{figures['num_cached']:.0f} prompt tokens handed over"
    )
