"""`pageturner bench steps`: where the time of a step on the CPU goes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from pageturner.service.commands.counts import check_counts
from pageturner.service.commands.output import write
from pageturner.service.commands.progress import progress
from pageturner.service.config import cache_directory
from pageturner.service.errors import ConfigError

if TYPE_CHECKING:
    from pageturner.service.bench.decoder_steps import StepTiming

EXAMPLE = "pageturner bench steps --batches 1,16,64x2048 --context 200 --prompts 128,2048"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, default, doc in (
        ("batches", "1,4,16,64", "decoding sequences of a step; 8x7000: eight of 7,000 tokens each"),
        ("prompts", "128", "tokens of a prompt that is alone"),
    ):
        parser.add_argument(f"--{name}", default=default, metavar="N,...", help=f"{doc} (default {default})")
    for name, kind, fallback, doc in (
        ("context", int, 200, "tokens that each decoding sequence holds, where the batch names none"),
        ("chunk", int, 512, "tokens of a prompt's step, at most"),
        ("seconds", float, 2.0, "of each case"),
    ):
        parser.add_argument(
            f"--{name}", type=kind, default=fallback, metavar="N", help=f"{doc} (default {fallback})"
        )
    parser.add_argument("--threads", type=int, metavar="N", help="of the team (default: as serving takes)")
    parser.add_argument(
        "--code",
        default="native",
        choices=("native", "avx2", "portable"),
        help="the kind of machine that the code is compiled for, to run on this one (default native)",
    )
    parser.add_argument(
        "--kv-dtype",
        default="bfloat16",
        choices=("float32", "bfloat16", "int8", "fp8"),
        help="what keys and values are kept in (default bfloat16)",
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace) -> int:
    """Print the figures.

    Raises ConfigError for a number below 1 or code that this machine cannot run, CompilerUnavailable
    without a compiler.
    """
    from pageturner.service.bench.decoder_steps import DecoderShape, StepCase, measure_steps
    from pageturner.service.bench.machines import compiler_flags
    from pageturner.service.model.kv_dtypes import POOL_DTYPES
    from pageturner.service.startup.container import own_processors, processor_limit, usable_processors

    check_counts(arguments, "context", "chunk", "threads")
    machine = compiler_flags(arguments.code)
    num_threads = arguments.threads or usable_processors(own_processors(), processor_limit())
    cases = []
    for batch in _parts(arguments.batches):
        count, _, context = batch.partition("x")
        keys = _number("--batches", context) if context else arguments.context
        cases.append(StepCase(_number("--batches", count), keys))
    cases += [StepCase(1, _number("--prompts", part), arguments.chunk) for part in _parts(arguments.prompts)]
    with progress(len(cases)) as advance:
        timings = measure_steps(
            DecoderShape(),
            cases,
            num_threads,
            arguments.seconds,
            cache_directory(),
            lambda timing: advance(f"{timing.num_sequences} x {timing.num_keys} keys", 1),
            machine=machine,
            kv_dtype=POOL_DTYPES[arguments.kv_dtype],
        )
    if arguments.json:
        write(
            json.dumps(
                {
                    "code": arguments.code,
                    "kv_dtype": arguments.kv_dtype,
                    "num_threads": num_threads,
                    "timings": [asdict(t) for t in timings],
                },
                indent=2,
            )
        )
        return 0
    write("\n".join(_lines(timings, num_threads, f"{arguments.code} code, KV in {arguments.kv_dtype}")))
    return 0


def _lines(timings: Sequence[StepTiming], num_threads: int, kinds: str) -> Iterator[str]:
    phases = tuple(timings[0].phases)
    yield f"one step or prompt, 4-bit groups, SmolLM2-135M's shape, {kinds}, {num_threads} threads, ms"
    yield f"{'':20} {'all':>8} " + " ".join(f"{name:>9}" for name in phases)
    for t in timings:
        name = f"{t.num_sequences} x {t.num_keys} decode" if t.chunk is None else f"prompt of {t.num_keys}"
        yield f"{name:20} {t.milliseconds:8.2f} " + " ".join(f"{t.phases[each]:9.2f}" for each in phases)
    yield ""
    yield f"{'':20} {'KV MB':>8} {'attention, GB/s':>16} {'plain loop, GB/s':>17} {'ratio':>6}"
    for t in timings:
        if t.chunk is None:
            name, loop = f"{t.num_sequences} x {t.num_keys} decode", t.loop_bytes_per_second
            yield (
                f"{name:20} {t.kv_bytes / 1e6:8.1f} {t.bytes_per_second / 1e9:16.1f} {loop / 1e9:17.1f} "
                f"{t.bytes_per_second / loop:6.2f}"
            )


def _parts(text: str) -> list[str]:
    return text.split(",") if text else []


def _number(flag: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ConfigError(flag, f"{text!r} is no number") from None
    if number < 1:
        raise ConfigError(flag, f"{number} is below 1")
    return number
