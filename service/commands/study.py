"""`pageturner study`: every built-in policy against its axis's default, where it should win; how servers are
best sent to; and whether prefill is best apart."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pageturner.service.commands.output import note, show, write
from pageturner.service.commands.progress import progress
from pageturner.service.commands.result_files import check_folder
from pageturner.service.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pageturner.service.simulator.machine import SimulatedMachine

HELP = "run the study of all built-in policies in the simulator"
EXAMPLE = "pageturner study --only routing --out results"

APART = "apart"
"""No axis, but a question of its own."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--machine", default="h100-8b", metavar="FILE", help="what it runs on (%(default)s)")
    add("--seeds", type=int, default=10, metavar="N", help="runs of each, with seeds 0 .. N-1 (%(default)s)")
    add(
        "--only",
        metavar="AXIS",
        help="only the policies of one axis; routing: of many servers; apart: shall some prefill for others",
    )
    add("--replicas", type=int, metavar="N", help="of routing: on N servers in the place of 16")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="study.json, study.md, gains.png and page.html; of routing and apart likewise",
    )
    add("--json", action="store_true", help="the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    from pageturner.policies.interfaces import ALL_AXES, FLEET_AXES
    from pageturner.service.simulator.machine import load_machine

    if arguments.seeds < 2:
        raise ConfigError("--seeds", f"an interval needs two at least, not {arguments.seeds}")
    if arguments.only not in (None, APART, *ALL_AXES):
        known = ", ".join((*ALL_AXES, APART))
        raise ConfigError("--only", f"no policy axis {arguments.only!r}; there are {known}")
    if arguments.replicas is not None and arguments.only not in FLEET_AXES:
        raise ConfigError("--replicas", "is for --only routing")
    if arguments.replicas is not None and arguments.replicas < 2:
        raise ConfigError("--replicas", f"routing needs two servers at least, not {arguments.replicas}")
    if arguments.out:
        from pageturner.service.simulator.plots import check_matplotlib

        check_matplotlib()
        check_folder("--out", arguments.out)
    machine = load_machine(arguments.machine)
    if arguments.only in FLEET_AXES:
        return _run_routing(arguments, machine)
    if arguments.only == APART:
        return _run_apart(arguments, machine)
    return _run_axes(arguments, machine)


def _run_axes(arguments: argparse.Namespace, machine: SimulatedMachine) -> int:
    """The policies of a server's scheduler."""
    from pageturner.service.simulator.study import render, run_study, write_study
    from pageturner.service.simulator.study_cases import CASES

    cases = [case for case in CASES if arguments.only in (None, case.axis)]
    with progress(len(cases)) as advance:
        findings = run_study(machine, range(arguments.seeds), lambda text: advance(text, 1), cases)
    return _tell(arguments, findings, _setting(arguments, machine), write_study, render)


def _run_routing(arguments: argparse.Namespace, machine: SimulatedMachine) -> int:
    """The policies of who sends to many servers."""
    from pageturner.service.simulator.routing_cases import CASES, NUM_SERVERS
    from pageturner.service.simulator.routing_study import (
        render_routing,
        run_routing_study,
        write_routing_study,
    )

    num_servers = arguments.replicas or NUM_SERVERS
    with progress(len(CASES)) as advance:
        findings = run_routing_study(
            machine, range(arguments.seeds), lambda text: advance(text, 1), num_servers=num_servers
        )
    setting = _setting(arguments, machine) | {"replicas": num_servers}
    return _tell(arguments, findings, setting, write_routing_study, render_routing)


def _run_apart(arguments: argparse.Namespace, machine: SimulatedMachine) -> int:
    """Prefill apart or together."""
    from pageturner.service.simulator.apart_cases import CASES, NUM_SERVERS
    from pageturner.service.simulator.apart_study import render_apart, run_apart_study, write_apart_study

    with progress(len(CASES)) as advance:
        findings = run_apart_study(machine, range(arguments.seeds), lambda text: advance(text, 1))
    setting = _setting(arguments, machine) | {"replicas": NUM_SERVERS}
    return _tell(arguments, findings, setting, write_apart_study, render_apart)


class _Found(Protocol):
    def to_json(self) -> dict[str, Any]: ...


_F = TypeVar("_F", bound=_Found)


def _setting(arguments: argparse.Namespace, machine: SimulatedMachine) -> dict[str, Any]:
    return {"machine": machine.name, "seeds": arguments.seeds}


def _tell(
    arguments: argparse.Namespace,
    findings: Sequence[_F],
    setting: dict[str, Any],
    write_to: Callable[[Sequence[_F], dict[str, Any], Path], Path],
    render: Callable[[Sequence[_F]], RenderableType],
) -> int:
    """Files, where they are asked for, then the findings to the terminal or as JSON."""
    if arguments.out:
        note(f"wrote {write_to(findings, setting, arguments.out)}")
    if arguments.json:
        write(json.dumps([found.to_json() for found in findings], indent=2))
    else:
        show(render(findings))
    return 0
