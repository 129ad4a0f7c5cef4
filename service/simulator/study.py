"""The study: every built-in against its axis's default, where it should win, and by how much it does."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from pageturner.policies import registry
from pageturner.service.simulator.contenders import parse_policies
from pageturner.service.simulator.experiment import differences, run_experiment
from pageturner.service.simulator.figures import METRIC, Interval
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.report import number
from pageturner.service.simulator.study_cases import CASES, Case


@dataclass(frozen=True, slots=True)
class Finding:
    """What a case came to. difference: the policy less the default, paired by seed."""

    case: Case
    policy: str
    default: Interval
    difference: Interval

    @property
    def is_win(self) -> bool:
        """The interval leaves out zero, on the better side."""
        better = METRIC[self.case.metric].more_is_better
        return self.difference.excludes_zero and (self.difference.mean > 0) == bool(better)

    @property
    def gain(self) -> Interval:
        """The improvement as a share of the default's mean: above 0 is better."""
        base = abs(self.default.mean) or 1.0
        low, high = self.difference.low / base, self.difference.high / base
        mean = self.difference.mean / base
        if METRIC[self.case.metric].more_is_better:
            return Interval(mean, low, high, self.difference.num_seeds)
        return Interval(-mean, -high, -low, self.difference.num_seeds)

    def to_json(self) -> dict[str, Any]:
        """As study.json has it."""
        return {
            "axis": self.case.axis,
            "policy": self.policy,
            "against": registry.DEFAULTS[self.case.axis],
            "setting": self.case.why,
            "metric": self.case.metric,
            "default": asdict(self.default),
            "difference": asdict(self.difference),
            "gain": asdict(self.gain),
            "is_win": self.is_win,
        }


def run_study(
    machine: SimulatedMachine, seeds: Sequence[int], say: Callable[[str], None], cases: Sequence[Case] = CASES
) -> tuple[Finding, ...]:
    """Every case on every seed; each takes seconds."""
    findings = []
    for case in cases:
        findings.append(run_case(case, machine, seeds))
        finding = findings[-1]
        verdict = "wins" if finding.is_win else "no win"
        say(f"{case.axis}={finding.policy}: {verdict}, {case.metric} {finding.gain.mean:+.1%}")
    return tuple(findings)


def run_case(case: Case, machine: SimulatedMachine, seeds: Sequence[int]) -> Finding:
    """The case on `machine`, with its pools, bounds and step times."""
    setting = replace(
        machine,
        cache=replace(machine.cache, num_blocks=case.num_blocks, num_host_blocks=case.num_host_blocks),
        scheduler=replace(machine.scheduler, **case.bounds),
        step_time=replace(machine.step_time, **case.step_time),
        measured=machine.step_time if case.has_drifted else None,
    )
    sets = (case.others, f"{case.others};{case.axis}={case.policy}")
    base, policy = run_experiment(
        [parse_policies(text).on(setting) for text in sets],
        {seed: case.recipe.make("study", seed) for seed in seeds},
    )
    name = registry.name_of(getattr(parse_policies(sets[1]).on(setting).policies, case.axis))
    return Finding(case, name, base.intervals[case.metric], differences(policy, base)[case.metric])


def render(findings: Sequence[Finding]) -> Table:
    """A row for each finding, wins in green."""
    table = Table(title="each built-in against its axis's default, paired by seed, 95 % intervals")
    for column in ("policy", "against", "where", "figure", "default", "difference", "better by"):
        table.add_column(column, overflow="fold")
    for row in rows(findings):
        table.add_row(*row[:-1], f"[{'green' if row[-1].startswith('+') else 'red'}]{row[-1]}[/]")
    return table


def rows(findings: Sequence[Finding]) -> list[tuple[str, ...]]:
    """A finding as the cells of a table."""
    return [
        (
            f"{finding.case.axis}={finding.policy}",
            registry.DEFAULTS[finding.case.axis],
            finding.case.why,
            METRIC[finding.case.metric].title,
            number(finding.default.mean),
            _interval(finding.difference),
            f"{finding.gain.mean:+.1%}" if finding.is_win else f"no win ({finding.gain.mean:+.1%})",
        )
        for finding in findings
    ]


def _interval(found: Interval) -> str:
    return f"{found.mean:+.4g} [{number(found.low)}, {number(found.high)}]"


def write_study(findings: Sequence[Finding], setting: dict[str, Any], folder: Path) -> Path:
    """study.json, study.md, gains.png and page.html in `folder`; returns the page's path."""
    from pageturner.service.simulator.plots import draw_gains, embed

    folder.mkdir(parents=True, exist_ok=True)
    document = {"setting": setting, "findings": [finding.to_json() for finding in findings]}
    (folder / "study.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    heads = ("policy", "against", "where", "figure", "default", "difference", "better by")
    lines = [heads, tuple("---" for _ in heads), *rows(findings)]
    (folder / "study.md").write_text(
        "".join("| " + " | ".join(line) + " |\n" for line in lines), encoding="utf-8"
    )
    picture = draw_gains(
        [(f"{f.case.axis}={f.policy}", METRIC[f.case.metric].title, f.gain, f.is_win) for f in findings]
    )
    (folder / "gains.png").write_bytes(picture)
    table = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows(findings)
    )
    head = "<tr>" + "".join(f"<th>{name}</th>" for name in heads) + "</tr>"
    page = folder / "page.html"
    page.write_text(
        embed("The study", setting, f"<table>{head}\n{table}</table>", {"Gains": picture}), "utf-8"
    )
    return page
