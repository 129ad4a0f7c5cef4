"""Every routing policy in every setting, paired by seed: who wins where, and by how much."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from pageturner.policies import registry
from pageturner.service.simulator.experiment import Contender, ContenderRuns, differences, run_experiment
from pageturner.service.simulator.figures import METRIC, Interval
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.report import number
from pageturner.service.simulator.routing_cases import CASES, NUM_SERVERS, RoutingCase

POLICIES: tuple[str, ...] = tuple(policy.name for policy in registry.BUILT_IN["routing"])


@dataclass(frozen=True, slots=True)
class RoutingFinding:
    """One setting. outcomes: of each policy, named by it."""

    case: RoutingCase
    outcomes: tuple[ContenderRuns, ...]

    def interval(self, policy: str) -> Interval:
        """Of the setting's figure, over the seeds."""
        return self._runs(policy).intervals[self.case.metric]

    @property
    def best(self) -> str:
        """The policy of the best mean."""
        sign = -1 if METRIC[self.case.metric].more_is_better else 1
        return min(self.outcomes, key=lambda runs: sign * runs.intervals[self.case.metric].mean).name

    @property
    def winners(self) -> tuple[str, ...]:
        """The best, and those that the seeds do not tell from it."""
        best = self._runs(self.best)
        return tuple(
            runs.name
            for runs in self.outcomes
            if runs is best or not differences(runs, best)[self.case.metric].excludes_zero
        )

    def difference(self, policy: str, base: str) -> Interval:
        """`policy` less `base`, paired by seed."""
        return differences(self._runs(policy), self._runs(base))[self.case.metric]

    def to_json(self) -> dict[str, Any]:
        """Every policy's figure, and its difference from the best."""
        best = self.best
        return {
            "setting": self.case.name,
            "why": self.case.why,
            "metric": self.case.metric,
            "num_servers": self.case.fleet.num_replicas,
            "num_routers": self.case.fleet.num_routers,
            "report_seconds": self.case.fleet.report_seconds,
            "requests": len(self.outcomes[0].ttfts) // len(self.outcomes[0].figures),
            "best": best,
            "winners": list(self.winners),
            "policies": {
                runs.name: {
                    "interval": asdict(self.interval(runs.name)),
                    "difference_from_best": asdict(self.difference(runs.name, best)),
                    "runs": [dict(run) for run in runs.figures],
                }
                for runs in self.outcomes
            },
        }

    def _runs(self, policy: str) -> ContenderRuns:
        return next(runs for runs in self.outcomes if runs.name == policy)


def run_routing_study(
    machine: SimulatedMachine,
    seeds: Sequence[int],
    say: Callable[[str], None],
    cases: Sequence[RoutingCase] = CASES,
    num_servers: int = NUM_SERVERS,
) -> tuple[RoutingFinding, ...]:
    """Every case on every seed. say: told of each, in words."""
    findings = []
    for case in cases:
        findings.append(run_routing_case(case.on(num_servers), machine, seeds))
        found = findings[-1]
        say(f"{case.name}: {' = '.join(found.winners)}, {number(found.interval(found.best).mean)}")
    return tuple(findings)


def run_routing_case(case: RoutingCase, machine: SimulatedMachine, seeds: Sequence[int]) -> RoutingFinding:
    """One case, with its servers and routers, on `machine` with the case's pool."""
    setting = replace(machine, cache=replace(machine.cache, num_blocks=case.num_blocks))
    contenders = [
        Contender(
            name,
            registry.default_policies(),
            setting,
            case.fleet,
            registry.create("routing", name),
        )
        for name in POLICIES
    ]
    workloads = {seed: case.recipe.make("study", seed) for seed in seeds}
    return RoutingFinding(case, run_experiment(contenders, workloads))


def render_routing(findings: Sequence[RoutingFinding]) -> Table:
    """A row for each setting, winners in green."""
    table = Table(title="where each routing policy wins: TTFT mean, s, ± 95 % interval over the seeds")
    table.add_column("setting", overflow="fold")
    for name in POLICIES:
        table.add_column(name, justify="right", overflow="fold")
    for found in findings:
        cells = [
            Text(cell, style="green" if name in found.winners else "") for name, cell in _cells(found).items()
        ]
        table.add_row(found.case.name, *cells)
    return table


def routing_markdown(findings: Sequence[RoutingFinding]) -> str:
    """The same for a file, winners in bold."""
    lines = [("setting", "what", *POLICIES), tuple("---" for _ in range(2 + len(POLICIES)))]
    for found in findings:
        cells = [f"**{cell}**" if name in found.winners else cell for name, cell in _cells(found).items()]
        lines.append((found.case.name, found.case.why, *cells))
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def write_routing_study(findings: Sequence[RoutingFinding], setting: dict[str, Any], folder: Path) -> Path:
    """routing.json, routing.md and routing.png in `folder`; returns the picture's path."""
    from pageturner.service.simulator.plots import draw_ratios

    folder.mkdir(parents=True, exist_ok=True)
    document = {"setting": setting, "settings": [found.to_json() for found in findings]}
    (folder / "routing.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (folder / "routing.md").write_text(routing_markdown(findings), encoding="utf-8")
    rows = [(f.case.name, {name: f.interval(name).mean for name in POLICIES}) for f in findings]
    picture = folder / "routing.png"
    picture.write_bytes(draw_ratios(rows, "times the best policy's mean TTFT"))
    return picture


def _cells(found: RoutingFinding) -> dict[str, str]:
    cells = {}
    for name in POLICIES:
        interval = found.interval(name)
        cells[name] = f"{number(interval.mean)} ± {number(interval.half_width or 0.0)}"
    return cells
