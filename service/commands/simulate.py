"""`pageturner simulate`: policy sets side by side on one workload, on a virtual clock."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pageturner.service.commands.counts import check_counts
from pageturner.service.commands.output import note, show, write
from pageturner.service.commands.policy_authoring import find_modules_in
from pageturner.service.commands.progress import progress, reading
from pageturner.service.commands.result_files import check_folder
from pageturner.service.errors import ConfigError

if TYPE_CHECKING:
    from pageturner.service.simulator.acceptance import Acceptance
    from pageturner.service.simulator.experiment import WorkloadOfSeed
    from pageturner.service.simulator.fleet_setup import FleetSetup
    from pageturner.service.simulator.handover import Handover
    from pageturner.service.simulator.workload import SimulatedWorkload

HELP = "compare scheduling policies on a workload, on a virtual clock"
EXAMPLE = (
    "pageturner simulate --workload bursty --policies '' --policies 'late: victim=last-arrived' "
    "--sweep cache.num_blocks=400,800 --seeds 5 --plot out"
)


_HANDOVER = {"link_gbs": "link_gbs", "link_latency": "link_seconds", "lose_prefill_at": "loses_at"}
"""Fields of `Handover` by their flag."""

MAX_SCHEDULERS = 8
"""Servers up to which each is the scheduler itself unless told otherwise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--workload",
        default="mixed",
        metavar="FILE|RECIPE[:FIELD=VALUE,...]",
        help="a trace (BurstGPT, Azure LLM, Mooncake, Qwen-Bailian, serve --record), or a recipe "
        "(%(default)s)",
    )
    add("--limit", type=int, metavar="N", help="of a trace: N requests in a row, from where the seed says")
    add("--speed", type=float, default=1.0, metavar="X", help="arrivals X times as fast (%(default)s)")
    add("--concurrency", type=int, metavar="N", help="a closed loop of N instead of the arrival times")
    add(
        "--policies",
        action="append",
        metavar="[NAME:] AXIS=POLICY;...",
        help="a policy set, the rest being defaults; once for each to compare",
    )
    add("--sweep", action="append", default=[], metavar="KEY=VALUE,...", help="each set once with each value")
    add("--replicas", type=int, metavar="N", help="N servers, and a router that sends to them")
    add(
        "--routing",
        metavar="POLICY,...",
        help="with --replicas: each set once with each of these routing policies",
    )
    add(
        "--servers",
        choices=("scheduler", "coarse"),
        help="with --replicas: the scheduler itself, the default up to 8 of them, or its default policies in "
        "the large, many steps at once, for thousands of servers",
    )
    add(
        "--routers",
        type=int,
        default=1,
        metavar="N",
        help="with --replicas: N that each know what they sent, and what servers report (%(default)s)",
    )
    add(
        "--report-interval",
        type=float,
        metavar="S",
        help="with --replicas: seconds between two reports of a server (none with one router, else 1)",
    )
    add(
        "--prefill-replicas",
        type=int,
        metavar="P",
        help="with --replicas: P of the N compute prompts for the others, and hand the KV over",
    )
    add(
        "--link-gbs",
        type=float,
        metavar="G",
        help="with --prefill-replicas: 1e9 bytes a second that a server sends, or takes in (12.5)",
    )
    add(
        "--link-latency",
        type=float,
        metavar="S",
        help="with --prefill-replicas: seconds from one server to another beside that (0.0001)",
    )
    add(
        "--lose-prefill-at",
        type=float,
        metavar="S",
        help="with --prefill-replicas: the first of them is lost then",
    )
    add("--machine", default="h100-8b", metavar="FILE", help="what it runs on (%(default)s)")
    add(
        "--drafts",
        metavar="NAME=VALUE,...",
        help="speculate on answers of such luck: repeating=0.5, odds=0.3, ... (service/simulator/README.md)",
    )
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
    from pageturner.service.simulator.acceptance import parse_acceptance
    from pageturner.service.simulator.contenders import check_names, parse_policies, sweep
    from pageturner.service.simulator.experiment import distinct_workloads, run_experiment
    from pageturner.service.simulator.figures import Slo
    from pageturner.service.simulator.machine import load_machine
    from pageturner.service.simulator.report import render, to_json

    _check_numbers(arguments)
    if arguments.plot:
        from pageturner.service.simulator.plots import check_matplotlib

        check_matplotlib()
        check_folder("--plot", arguments.plot)
    machine = load_machine(arguments.machine)
    acceptance = None if arguments.drafts is None else parse_acceptance(arguments.drafts)
    if acceptance is not None and machine.speculation.method == "none":
        machine = replace(machine, speculation=replace(machine.speculation, method="ngram"))
    find_modules_in(Path.cwd())
    setups = tuple(parse_policies(text) for text in arguments.policies or [""])
    if arguments.routing:
        setups = sweep(setups, f"routing={arguments.routing}")
    for text in arguments.sweep:
        setups = sweep(setups, text)
    check_names(setups)
    fleet = _fleet(arguments)
    contenders = [setup.on(machine, fleet) for setup in setups]
    source = _source(arguments, acceptance)
    for text in source.notes:
        note(text)
    workloads = distinct_workloads(source.workload_of, range(arguments.seeds))
    if len(workloads) < arguments.seeds:
        note(
            f"{arguments.seeds} seeds make {len(workloads)} different workloads, each run once for a set"
            if len(workloads) > 1
            else "the workload is the same for every seed, so it is run once for each set, without intervals"
        )
    with progress(len(contenders) * len(workloads)) as advance:
        outcomes = run_experiment(
            contenders,
            workloads,
            Slo(arguments.slo_ttft, arguments.slo_tpot),
            lambda text: advance(text, 1),
        )
    setting = {
        "workload": arguments.workload,
        "workload_notes": source.notes or None,
        "limit": arguments.limit,
        "speed": arguments.speed,
        "concurrency": arguments.concurrency,
        "drafts": arguments.drafts,
        "machine": machine.name,
        **({} if fleet is None else asdict(fleet)),
        "seeds": len(workloads),
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


def _check_numbers(arguments: argparse.Namespace) -> None:
    """Raises ConfigError."""
    check_counts(arguments, "seeds", "limit", "concurrency", "replicas", "routers")
    if (arguments.prefill_replicas or 0) < 0:
        raise ConfigError("--prefill-replicas", f"{arguments.prefill_replicas} is below 0")
    for name in ("speed", "slo_ttft", "slo_tpot"):
        value = getattr(arguments, name)
        if not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')}", f"{value:g} is not a number above 0")


def _fleet(arguments: argparse.Namespace) -> FleetSetup | None:
    """None for one server. Raises ConfigError for flags of several without --replicas."""
    from pageturner.service.simulator.fleet_setup import FleetSetup

    if arguments.replicas is None:
        given = ("routing", "servers", "report_interval", "prefill_replicas", *_HANDOVER)
        named = [name for name in given if getattr(arguments, name) is not None]
        if arguments.routers > 1:
            named.append("routers")
        if named:
            raise ConfigError(f"--{named[0].replace('_', '-')}", "needs --replicas N, the number of servers")
        return None
    default = 0.0 if arguments.routers == 1 else 1.0
    interval = default if arguments.report_interval is None else arguments.report_interval
    num_prefill = arguments.prefill_replicas or 0
    is_coarse = arguments.replicas > MAX_SCHEDULERS and not num_prefill
    if arguments.servers is not None:
        is_coarse = arguments.servers == "coarse"
    handover = _handover(arguments)
    try:
        return FleetSetup(
            arguments.replicas,
            is_coarse,
            arguments.routers,
            interval,
            num_prefill=num_prefill,
            handover=handover,
        )
    except ValueError as error:
        flag = "--prefill-replicas" if "num_prefill" in str(error) else "--report-interval"
        raise ConfigError(flag, str(error)) from error


def _handover(arguments: argparse.Namespace) -> Handover:
    """Raises ConfigError for a link that could not be."""
    from pageturner.service.simulator.handover import Handover

    handover = Handover()
    for flag, name in _HANDOVER.items():
        value = getattr(arguments, flag)
        if value is None:
            continue
        try:
            handover = replace(handover, **{name: value})
        except ValueError as error:
            raise ConfigError(f"--{flag.replace('_', '-')}", str(error)) from error
    return handover


@dataclass(frozen=True, slots=True)
class _Source:
    """Where workloads come from. notes: what was read and what was left out, in words."""

    workload_of: WorkloadOfSeed
    notes: tuple[str, ...] = ()


def _source(arguments: argparse.Namespace, acceptance: Acceptance | None) -> _Source:
    """A recipe, or a trace, which is read here, once. Raises PageturnerError.

    acceptance: of drafts; with one, each seed has other luck, also on a trace that is taken whole."""
    from pageturner.service.simulator.synthetic import RECIPES, parse_recipe
    from pageturner.service.simulator.traces import read_trace

    def as_asked(workload: SimulatedWorkload, seed: int) -> SimulatedWorkload:
        if arguments.concurrency:
            workload = replace(workload, concurrency=arguments.concurrency)
        if acceptance is not None:
            workload = replace(workload, acceptance=replace(acceptance, seed=seed))
        return workload.at_rate(arguments.speed)

    if arguments.workload.partition(":")[0] in RECIPES or not Path(arguments.workload).exists():
        name, recipe = parse_recipe(arguments.workload)
        if arguments.limit is not None:
            raise ConfigError("--limit", f"is for traces; a recipe has requests={arguments.limit} for it")
        return _Source(lambda seed: as_asked(recipe.make(name, seed), seed))
    with reading(arguments.workload) as on_bytes:
        trace = read_trace(Path(arguments.workload), on_bytes)
    source = trace.source
    found = f"{source.format}, {source.num_requests:,} requests over {source.seconds:,.1f} s"
    notes = tuple(f"{source.name}: {text}" for text in (found, *source.notes))
    if arguments.limit is None or arguments.limit >= source.num_requests:
        whole = trace.workload()
        return _Source(lambda seed: as_asked(whole, seed), notes)
    limit: int = arguments.limit
    return _Source(lambda seed: as_asked(trace.window(limit, seed), seed), notes)
