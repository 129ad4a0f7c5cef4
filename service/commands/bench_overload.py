"""`pageturner bench overload`: goodput, refusals and their advice at more load than there is capacity."""

from __future__ import annotations

import argparse
import json

from pageturner.service.commands.counts import add_counts, check_counts
from pageturner.service.commands.flags import add_config_flags, config_arguments
from pageturner.service.commands.output import write
from pageturner.service.commands.progress import progress
from pageturner.service.config import cache_directory
from pageturner.service.errors import ConfigError

EXAMPLE = "pageturner bench overload --deadline 5 --multiples 1,2,5 --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_counts(
        parser,
        ("prompt-tokens", 64, "tokens of each prompt"),
        ("output-tokens", 32, "tokens of each output"),
        ("at-once", 64, "max_num_seqs of the server"),
        ("queue", 64, "max_waiting of the server"),
    )
    for name, seconds, doc in (
        ("deadline", 5.0, "seconds that each request has"),
        ("seconds", 20.0, "length of each phase"),
    ):
        parser.add_argument(
            f"--{name}", type=float, default=seconds, metavar="X", help=f"{doc} (default {seconds:g})"
        )
    for name, doc in (
        ("step-ms", "in place of the model one that takes so many milliseconds a step, whatever else runs"),
        ("token-ms", "and so many for each token in it"),
    ):
        parser.add_argument(f"--{name}", type=float, metavar="X", help=doc)
    parser.add_argument(
        "--multiples",
        type=_multiples,
        default=(1.0, 2.0, 5.0),
        metavar="X,...",
        help="loads, in capacities (default 1,2,5)",
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    add_config_flags(parser)
    parser.set_defaults(measure=run)


def _multiples(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def run(arguments: argparse.Namespace) -> int:
    """Print the figures. Raises ConfigError for what is out of bounds, ModelError if a process failed."""
    from pageturner.service.bench.overload import OverloadPlan, document, measure_overload, num_phases

    _check(arguments)
    plan = OverloadPlan(
        arguments.prompt_tokens,
        arguments.output_tokens,
        arguments.deadline,
        arguments.seconds,
        arguments.multiples,
        arguments.at_once,
        arguments.queue,
        None if arguments.step_ms is None else arguments.step_ms / 1000,
        (arguments.token_ms or 0.0) / 1000,
    )
    with progress(num_phases(plan)) as advance:
        result = measure_overload(
            plan, config_arguments(arguments), cache_directory(), lambda text: advance(text, 1)
        )
    if arguments.json:
        write(json.dumps(document(result), indent=2))
        return 0
    write(
        f"capacity {min(result.capacities):.2f} to {max(result.capacities):.2f} requests/s of "
        f"{plan.prompt_tokens} + {plan.output_tokens} tokens; deadlines of {plan.deadline:g} s"
    )
    write("  load  goodput  whole  refused  shed  late  refusal p50 / p99 ms  answer p50 s  send lag p99 ms")
    for load in result.loads:
        count = load.outcomes.get
        others = sum(load.outcomes.values()) - count("whole", 0)
        refused = count("deadline_too_close", 0) + count("queue_full", 0)
        shed = count("deadline_unreachable", 0)
        write(
            f"{load.multiple:4g} x  {load.goodput:7.0%}  {count('whole', 0):5d}  {refused:7d}  {shed:4d}  "
            f"{others - refused - shed:4d}  {load.refusal_p50:9.1f} / {load.refusal_p99:<9.1f} "
            f"{load.latency_p50:12.2f}  {load.send_lag_p99:15.1f}"
        )
    retries = result.retries
    if retries.told:
        write(
            f"a burst over the queue: {len(retries.told)} refused (p99 {retries.refusal_p99:.1f} ms), told "
            f"to return after {retries.told[0]:.1f} to {retries.told[-1]:.1f} s; there was room after "
            f"{retries.true[0]:.1f} to {retries.true[-1]:.1f} s; told / true, median: {retries.ratio:.2f}; "
            f"{retries.taken_in} were taken in on their return"
        )
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for the first that is out of bounds."""
    check_counts(arguments, "prompt_tokens", "output_tokens", "at_once", "queue")
    for name, most in (("deadline", 3600), ("seconds", 3600)):
        if not 0 < (value := getattr(arguments, name)) < most:
            raise ConfigError(f"--{name}", f"{value} is not in (0, {most})")
    for name in ("step_ms", "token_ms"):
        if (value := getattr(arguments, name)) is not None and not 0 <= value < 60_000:
            raise ConfigError(f"--{name.replace('_', '-')}", f"{value} is not in [0, 60000)")
    if not all(0 < multiple <= 100 for multiple in arguments.multiples):
        raise ConfigError("--multiples", "each is in (0, 100]")
