"""`pageturner bench front`: what a token costs on its way from the engine to a client."""

from __future__ import annotations

import argparse
import json

from pageturner.service.commands.counts import add_counts, check_counts
from pageturner.service.commands.output import write
from pageturner.service.commands.progress import progress
from pageturner.service.config import cache_directory
from pageturner.service.errors import ConfigError

EXAMPLE = "pageturner bench front --streams 64 --step-ms 20 --json"
_MOST_STREAMS = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_counts(
        parser,
        ("streams", 64, "requests at once"),
        ("prompt-tokens", 64, "tokens of each prompt, about"),
        ("output-tokens", 256, "tokens of each output"),
        ("rounds", 3, "rounds, each with clients and without"),
        ("client-processes", 1, "processes that the streams are spread over"),
    )
    for name, seconds, doc in (
        ("step-ms", 1.0, "milliseconds that a step of the model takes; at 0 each request may run alone"),
        ("seconds", 3.0, "length of each measurement"),
    ):
        parser.add_argument(
            f"--{name}", type=float, default=seconds, metavar="X", help=f"{doc} (default {seconds:g})"
        )
    parser.add_argument(
        "--client",
        choices=("library", "stub"),
        default="library",
        help="the Python client, or protoc's stub alone (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    parser.set_defaults(measure=run)


def run(arguments: argparse.Namespace) -> int:
    from pageturner.service.bench.front import document, measure_front
    from pageturner.service.bench.null_service import NullLoad

    _check(arguments)
    load = NullLoad(
        arguments.streams, arguments.prompt_tokens, arguments.output_tokens, arguments.step_ms / 1000
    )
    with progress(arguments.rounds) as advance:
        result = measure_front(
            load,
            arguments.rounds,
            arguments.seconds,
            arguments.client,
            arguments.client_processes,
            cache_directory(),
            lambda text: advance(text, 1),
        )
    if arguments.json:
        write(json.dumps(document(result), indent=2))
        return 0
    found = result.medians()
    write(
        f"{load.num_streams} streams, step {arguments.step_ms:g} ms, medians of {arguments.rounds} rounds: "
        f"{found['tokens_per_second']:.0f} tokens/s, {found['messages_per_token']:.2f} messages a token"
    )
    write(
        f"CPU a token: server {found['server_cpu']:.1f} us (engine alone {found['engine_cpu']:.1f}), "
        f"client {found['client_cpu']:.1f} us"
    )
    write(
        f"ITL p50 {found['itl_p50']:.1f}, p90 {found['itl_p90']:.1f}, p99 {found['itl_p99']:.1f} ms; "
        f"TTFT p50 {found['ttft_p50']:.1f}, p99 {found['ttft_p99']:.1f} ms"
    )
    write(
        f"engine steps/s: {found['steps_per_second']:.1f} with streams, "
        f"{found['engine_steps_per_second']:.1f} without, {found['steps_kept']:.0%} kept"
    )
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for the first that is out of bounds."""
    check_counts(arguments, "streams", "prompt_tokens", "output_tokens", "rounds", "client_processes")
    if arguments.streams > _MOST_STREAMS:
        raise ConfigError("--streams", f"{arguments.streams} is over {_MOST_STREAMS}")
    if arguments.client_processes > arguments.streams:
        raise ConfigError("--client-processes", f"{arguments.client_processes} for fewer streams")
    if not 0 <= arguments.step_ms < 60_000:
        raise ConfigError("--step-ms", f"{arguments.step_ms} is not in [0, 60000)")
    if not 0 < arguments.seconds < 600:
        raise ConfigError("--seconds", f"{arguments.seconds} is not in (0, 600)")
