"""`pageturner bench steps`: where the time of a step on the CPU goes."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from pageturner.service.commands.output import write
from pageturner.service.commands.progress import progress
from pageturner.service.config import cache_directory
from pageturner.service.errors import ConfigError

EXAMPLE = "pageturner bench steps --batches 1,16 --context 200 --prompts 128 --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, default, doc in (
        ("batches", "1,4,16,64", "decoding sequences of a step"),
        ("prompts", "128", "tokens of a prompt that is a step by itself"),
    ):
        parser.add_argument(f"--{name}", default=default, metavar="N,...", help=f"{doc} (default {default})")
    for name, kind, fallback, doc in (
        ("context", int, 200, "tokens that each decoding sequence holds"),
        ("seconds", float, 2.0, "of each case"),
    ):
        parser.add_argument(
            f"--{name}", type=kind, default=fallback, metavar="N", help=f"{doc} (default {fallback})"
        )
    parser.add_argument("--threads", type=int, metavar="N", help="of the team (default: as serving takes)")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace) -> int:
    """Print the figures. Raises ConfigError for a number below 1, CompilerUnavailable without a compiler."""
    from pageturner.service.bench.decoder_steps import DecoderShape, measure_steps
    from pageturner.service.startup.container import own_processors, processor_limit, usable_processors

    batches, prompts = (_numbers(f"--{name}", getattr(arguments, name)) for name in ("batches", "prompts"))
    for name in ("context", "threads"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}", f"{value} is below 1")
    num_threads = arguments.threads or usable_processors(own_processors(), processor_limit())
    cases = [(batch, 1, arguments.context) for batch in batches] + [(1, tokens, tokens) for tokens in prompts]
    with progress(len(cases)) as advance:
        timings = measure_steps(
            DecoderShape(),
            cases,
            num_threads,
            arguments.seconds,
            cache_directory(),
            lambda timing: advance(f"{timing.num_sequences} x {timing.num_rows} rows", 1),
        )
    if arguments.json:
        write(json.dumps({"num_threads": num_threads, "timings": [asdict(t) for t in timings]}, indent=2))
        return 0
    phases = tuple(timings[0].phases)
    lines = [
        f"one step, 4-bit groups, SmolLM2-135M's shape, {num_threads} threads, ms",
        f"{'seqs':>5} {'rows':>5} {'keys':>5} {'step':>8} " + " ".join(f"{name:>9}" for name in phases),
    ]
    for t in timings:
        lines.append(
            f"{t.num_sequences:5} {t.num_rows:5} {t.num_keys:5} {t.milliseconds:8.2f} "
            + " ".join(f"{t.phases[name]:9.2f}" for name in phases)
        )
    write("\n".join(lines))
    return 0


def _numbers(flag: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ConfigError(flag, f"{text!r} is no list of numbers") from None
    if any(number < 1 for number in numbers):
        raise ConfigError(flag, f"{min(numbers)} is below 1")
    return numbers
