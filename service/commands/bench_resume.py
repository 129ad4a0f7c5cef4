"""`pageturner bench resume`: what clients notice of a server that is killed in mid-stream."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal

from pageturner.service.commands.counts import add_counts, check_counts
from pageturner.service.commands.flags import add_config_flags, config_arguments
from pageturner.service.commands.output import write
from pageturner.service.commands.progress import progress

EXAMPLE = "pageturner bench resume --streams 32 --rounds 3 --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_counts(
        parser,
        ("streams", 32, "streams at once, of eight kinds in turns"),
        ("output-tokens", 96, "tokens of each choice, at most"),
        ("rounds", 3, "servers to be ended, one after the other"),
    )
    parser.add_argument(
        "--signal",
        choices=("KILL", "TERM"),
        default="KILL",
        help="what ends a server; on TERM it drains, for --drain-seconds (default KILL)",
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    add_config_flags(parser)
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace) -> int:
    """Print the figures; 1 if a token was lost, came twice, or was another.

    Raises ConfigError for a count below 1, PageturnerError if a stream failed.
    """
    from pageturner.service.bench.resume import ResumeLoad, measure_resume

    check_counts(arguments, "streams", "output_tokens", "rounds")
    load = ResumeLoad(arguments.streams, arguments.output_tokens)
    with progress(arguments.rounds) as advance:
        result = measure_resume(
            load,
            arguments.rounds,
            config_arguments(arguments),
            lambda text: advance(text, 1),
            signal.Signals[f"SIG{arguments.signal}"],
        )
    figures = result.figures()
    if arguments.json:
        write(json.dumps({**dataclasses.asdict(result), **figures}, indent=2))
    else:
        write(_figures_in_words(figures, arguments.rounds))
    return int(any(figures[name] for name in ("num_lost", "num_twice", "num_different")))


def _figures_in_words(figures: dict[str, float], num_ended: int) -> str:
    lines = [
        f"{figures['num_streams']:.0f} streams, servers ended: {num_ended}, "
        f"{figures['num_resumed']:.0f} resumed; of {figures['num_tokens']:.0f} tokens "
        f"{figures['num_lost']:.0f} lost and {figures['num_twice']:.0f} twice, "
        f"{figures['num_different']:.0f} answers different"
    ]
    if "resume_seconds_p50" in figures:
        p50, p99 = figures["resume_seconds_p50"], figures["resume_seconds_p99"]
        lines.append(f"from a stream's break to what came next: p50 {p50:.3f} s, p99 {p99:.3f} s")
    return "\n".join(lines)
