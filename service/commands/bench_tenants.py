"""`pageturner bench tenants`: what a tenant that floods the service costs a quiet one."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from pageturner.service.commands.flags import add_config_flags, config_arguments
from pageturner.service.commands.output import write
from pageturner.service.commands.progress import progress
from pageturner.service.errors import ConfigError

if TYPE_CHECKING:
    from pageturner.service.bench.tenants import TenantsLoad, TenantsResult

EXAMPLE = "pageturner bench tenants --open 200 --json"

_COUNTS = (
    ("requests", 20, "requests of the quiet tenant in each phase, one a second"),
    ("prompt-tokens", 64, "tokens of each of its prompts"),
    ("output-tokens", 64, "tokens of each answer to it"),
    ("open", 200, "requests that the flooding tenant keeps open"),
    ("flood-prompt-tokens", 128, "tokens of each of its prompts"),
    ("flood-output-tokens", 128, "tokens of each answer to it"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, default, doc in _COUNTS:
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{doc} (default {default})"
        )
    parser.add_argument(
        "--machine",
        metavar="MACHINE",
        help="simulate this machine (a name that `simulate` knows, or a file) in place of a server, "
        "with equal shares and first come first served",
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    add_config_flags(parser)
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace) -> int:
    """Print the figures. Raises ConfigError for a count below 1, PageturnerError if the server fails."""
    from pageturner.service.bench.tenants import TenantsLoad, measure_tenants

    for name, _, _ in _COUNTS:
        if (value := getattr(arguments, name.replace("-", "_"))) < 1:
            raise ConfigError(f"--{name}", f"{value} is below 1")
    load = TenantsLoad(
        1.0,
        arguments.requests,
        arguments.prompt_tokens,
        arguments.output_tokens,
        arguments.open,
        arguments.flood_prompt_tokens,
        arguments.flood_output_tokens,
    )
    if arguments.machine is not None:
        return _simulate(load, arguments)
    with progress(2) as advance:
        result = measure_tenants(load, config_arguments(arguments), lambda text: advance(text, 1))
    if arguments.json:
        write(json.dumps({"load": dataclasses.asdict(load), **result.figures()}, indent=2))
        return 0
    _write(result)
    return 0


def _simulate(load: TenantsLoad, arguments: argparse.Namespace) -> int:
    from pageturner.service.bench.simulated_tenants import simulate_tenants
    from pageturner.service.simulator.machine import load_machine

    machine = load_machine(arguments.machine)
    results = {}
    with progress(2) as advance:
        for name, shares in (("equal shares", True), ("first come first served", False)):
            results[name] = simulate_tenants(load, machine, shares=shares)
            advance(name, 1)
    if arguments.json:
        figures = {name: result.figures() for name, result in results.items()}
        write(json.dumps({"load": dataclasses.asdict(load), "machine": machine.name, **figures}, indent=2))
        return 0
    for name, result in results.items():
        write(f"{name}:")
        _write(result)
    return 0


def _write(result: TenantsResult) -> None:
    alone, beside = result.alone.figures(), result.beside.figures()
    for name, title in (
        ("latency_p50", "latency p50"),
        ("latency_p90", "latency p90"),
        ("ttft_p50", "first token p50"),
        ("ttft_p90", "first token p90"),
    ):
        ratio = beside[name] / alone[name]
        write(f"{title:16}{alone[name]:8.3f} s alone {beside[name]:8.3f} s beside a flood, ratio {ratio:.2f}")
    write(
        f"{int(beside['failed'])} of {result.load.num_requests} failed; the flood had "
        f"{result.flood_tokens_per_second:.1f} output tokens/s, {result.flood_refused} of it were refused"
    )
