"""`pageturner bench scoring`: what log-probabilities of prompts and of continuations cost."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING

from pageturner.service.commands.flags import add_config_flags, config_arguments, config_flags
from pageturner.service.commands.output import write
from pageturner.service.commands.progress import progress
from pageturner.service.config import cache_directory, load_config
from pageturner.service.errors import ConfigError

if TYPE_CHECKING:
    from pageturner.service.bench.scored_steps import ScoredStep
    from pageturner.service.bench.scoring import ScoringResult

EXAMPLE = "pageturner bench scoring --prompt-tokens 1024 --continuations 64 --json"

_NUMBERS = (
    ("prompt-tokens", 1024, "tokens of each prompt that is scored"),
    ("continuations", 64, "continuations of a call of Score"),
    ("continuation-tokens", 16, "tokens of each continuation"),
    ("streams", 4, "streams beside which calls are made"),
    ("rounds", 5, "rounds of each kind, in turns"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, default, doc in _NUMBERS:
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{doc} (default {default})"
        )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    add_config_flags(parser)
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace) -> int:
    """Print the figures. Raises ConfigError for a number below 1, PageturnerError if a request fails."""
    from pageturner.service.bench.scoring import ScoringLoad, measure_scoring

    for name, _, _ in _NUMBERS:
        if (value := getattr(arguments, name.replace("-", "_"))) < 1:
            raise ConfigError(f"--{name}", f"{value} is below 1")
    load = ScoringLoad(
        arguments.prompt_tokens,
        arguments.continuations,
        arguments.continuation_tokens,
        streams=arguments.streams,
    )
    with progress(2 * arguments.rounds + 1) as advance:
        step = _scored_step(arguments)
        advance(f"steps of {step.rows} rows", 1)
        result = measure_scoring(
            load, arguments.rounds, config_arguments(arguments), lambda text: advance(text, 1)
        )
    if arguments.json:
        ratios = {kind: result.ratio(kind) for kind in result.prompts}
        write(json.dumps({**asdict(result), "ratios": ratios, "step": asdict(step)}, indent=2))
        return 0
    write("\n".join(lines(result, step)))
    return 0


def _scored_step(arguments: argparse.Namespace) -> ScoredStep:
    from pageturner.service.bench.scored_steps import ROWS, measure_scored_step
    from pageturner.service.logs.structured import warnings_on_standard_error
    from pageturner.service.startup.loading import load_model

    flags = config_flags(arguments)
    loaded = load_config(
        arguments.config, flags=flags, given={"cache.num_blocks": ROWS, "cache.swap_space": 0}
    )

    def work() -> ScoredStep:
        model = load_model(loaded, cache_directory(), warnings_on_standard_error())
        block_size = model.kv_cache.layout.block_size
        return measure_scored_step(model.runner, model.sampler, block_size, arguments.rounds)

    # In a thread that ends, with the OpenMP team that each thread has that ran torch.
    with ThreadPoolExecutor(1) as loader:
        return loader.submit(work).result()


def lines(result: ScoringResult, step: ScoredStep) -> Iterator[str]:
    """The figures in words."""
    load = result.load
    yield (
        f"a prompt of {load.prompt_tokens} tokens: prompt_logprobs 0 takes {result.ratio('logprobs'):.2f}, "
        f"5 takes {result.ratio('top5'):.2f} x the time of a plain one"
    )
    for name, added in (("scores", step.scored), ("scores by way of all logits", step.by_logits)):
        told = ", ".join(
            f"{1e3 * seconds:.1f} ms ({seconds / step.plain:.0%}) with {count}"
            for count, seconds in added.items()
        )
        yield f"a step of {step.rows} rows: {1e3 * step.plain:.1f} ms plain; {name} add {told} others"
    yield (
        f"Score of {load.continuations} x {load.continuation_tokens} tokens: {result.rate_alone:.0f} "
        f"tokens/s alone, {result.rate_beside:.0f} beside {load.streams} streams"
    )
    for name, gaps in (
        ("alone", result.alone),
        ("beside plain prompts", result.beside_prompts),
        ("beside calls of Score", result.beside),
    ):
        yield f"between two tokens {name}: {1e3 * gaps.p50:.1f} ms at p50, {1e3 * gaps.p99:.1f} at p99"
    ratio = result.beside.p99 / result.beside_prompts.p99
    yield f"at p99 streams wait {ratio:.2f} x as long beside calls of Score as beside plain prompts"
