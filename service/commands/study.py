"""`pageturner study`: every built-in policy against its axis's default, where it should win."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pageturner.service.commands.output import note, show, write
from pageturner.service.commands.progress import progress
from pageturner.service.commands.result_files import check_folder
from pageturner.service.errors import ConfigError

HELP = "run the study of all built-in policies in the simulator"
EXAMPLE = "pageturner study --out results"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--machine", default="h100-8b", metavar="FILE", help="what it runs on (%(default)s)")
    add("--seeds", type=int, default=10, metavar="N", help="runs of each, with seeds 0 .. N-1 (%(default)s)")
    add("--only", metavar="AXIS", help="only the policies of one axis")
    add("--out", type=Path, metavar="DIR", help="study.json, study.md, gains.png and page.html")
    add("--json", action="store_true", help="the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    from pageturner.policies.interfaces import AXES
    from pageturner.service.simulator.machine import load_machine
    from pageturner.service.simulator.study import render, run_study, write_study
    from pageturner.service.simulator.study_cases import CASES

    if arguments.seeds < 2:
        raise ConfigError("--seeds", f"an interval needs two at least, not {arguments.seeds}")
    if arguments.only is not None and arguments.only not in AXES:
        raise ConfigError("--only", f"no policy axis {arguments.only!r}; there are {', '.join(AXES)}")
    if arguments.out:
        from pageturner.service.simulator.plots import check_matplotlib

        check_matplotlib()
        check_folder("--out", arguments.out)
    machine = load_machine(arguments.machine)
    cases = [case for case in CASES if arguments.only in (None, case.axis)]
    with progress(len(cases)) as advance:
        findings = run_study(machine, range(arguments.seeds), lambda text: advance(text, 1), cases)
    if arguments.out:
        setting = {"machine": machine.name, "seeds": arguments.seeds}
        note(f"wrote {write_study(findings, setting, arguments.out)}")
    if arguments.json:
        write(json.dumps([finding.to_json() for finding in findings], indent=2))
        return 0
    show(render(findings))
    return 0
