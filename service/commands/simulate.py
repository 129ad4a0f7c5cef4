"""`pageturner simulate`: policy sets side by side on one workload, on a virtual clock."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from pageturner.service.commands.output import note, show, write
from pageturner.service.errors import ConfigError

if TYPE_CHECKING:
    from pageturner.service.simulator.workload import SimulatedWorkload

HELP = "compare scheduling policies on a workload, on a virtual clock"
EXAMPLE = (
    "pageturner simulate --workload mixed --policies '' --policies 'victim=last-arrived' "
    "--sweep cache.num_blocks=1500,3000 --seeds 5 --plot out"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--workload",
        default="mixed",
        metavar="FILE|RECIPE[:FIELD=VALUE,...]",
        help="a trace (BurstGPT, Azure LLM, Mooncake, serve --record), or a recipe (%(default)s)",
    )
    add("--limit", type=int, metavar="N", help="of a trace: N requests in a row, from where the seed says")
    add("--speed", type=float, default=1.0, metavar="X", help="arrivals X times as fast (%(default)s)")
    add("--concurrency", type=int, metavar="N", help="a closed loop of N instead of the arrival times")
    add(
        "--policies",
        action="append",
        metavar="AXIS=POLICY;...",
        help="a policy set, the rest being defaults; once for each to compare",
    )
    add("--sweep", action="append", default=[], metavar="KEY=VALUE,...", help="each set once with each value")
    add("--machine", default="h100-8b", metavar="FILE", help="what it runs on (%(default)s)")
    add("--seeds", type=int, default=5, metavar="N", help="runs of each, with seeds 0 .. N-1 (%(default)s)")
    add(
        "--slo-ttft",
        type=float,
        default=2.0,
        metavar="S",
        help="for goodput: to the first token (%(default)s)",
    )
    add(
        "--slo-tpot", type=float, default=0.1, metavar="S", help="for goodput: a token after it (%(default)s)"
    )
    add("--json", action="store_true", help="every figure of every run")
    add("--plot", type=Path, metavar="DIR", help="PNG files and one self-contained page.html")


def run(arguments: argparse.Namespace) -> int:
    from pageturner.service.simulator.contenders import parse_policies, sweep
    from pageturner.service.simulator.experiment import run_experiment
    from pageturner.service.simulator.figures import Slo
    from pageturner.service.simulator.machine import load_machine
    from pageturner.service.simulator.report import render, to_json

    for name in ("seeds", "limit", "concurrency"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}", f"{value} is below 1")
    if not arguments.speed > 0:
        raise ConfigError("--speed", f"{arguments.speed} is not above 0")
    machine = load_machine(arguments.machine)
    setups = tuple(parse_policies(text) for text in arguments.policies or [""])
    for text in arguments.sweep:
        setups = sweep(setups, text)
    outcomes = run_experiment(
        [setup.on(machine) for setup in setups],
        lambda seed: _workload(arguments, seed),
        range(arguments.seeds),
        Slo(arguments.slo_ttft, arguments.slo_tpot),
        note,
    )
    setting = {
        "workload": arguments.workload,
        "limit": arguments.limit,
        "speed": arguments.speed,
        "concurrency": arguments.concurrency,
        "machine": machine.name,
        "seeds": arguments.seeds,
        "slo_ttft_seconds": arguments.slo_ttft,
        "slo_tpot_seconds": arguments.slo_tpot,
    }
    document = to_json(outcomes, setting)
    if arguments.plot:
        from pageturner.service.simulator.plots import write_plots

        page = write_plots(outcomes, document, arguments.plot)
        note(f"wrote {page}")
    if arguments.json:
        write(json.dumps(document, indent=2))
        return 0
    show(render(outcomes))
    return 0


def _workload(arguments: argparse.Namespace, seed: int) -> SimulatedWorkload:
    from dataclasses import replace

    from pageturner.service.simulator.synthetic import RECIPES, parse_recipe
    from pageturner.service.simulator.traces import read_trace, window

    if arguments.workload.partition(":")[0] in RECIPES or not Path(arguments.workload).exists():
        name, recipe = parse_recipe(arguments.workload)
        workload = recipe.make(name, seed)
    else:
        trace = read_trace(Path(arguments.workload))
        workload = window(trace, arguments.limit or len(trace.requests), seed)
    if arguments.concurrency:
        workload = replace(workload, concurrency=arguments.concurrency)
    return workload.at_rate(arguments.speed)
