"""Prefill apart or together: for which loads it pays, in which figures, paired by seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from pageturner.service.simulator.apart_cases import ARRANGEMENTS, CASES, SLO, ApartCase
from pageturner.service.simulator.experiment import ContenderRuns, differences, run_experiment
from pageturner.service.simulator.figures import METRIC, Interval
from pageturner.service.simulator.machine import SimulatedMachine

JUDGED = ("ttft_p50", "ttft_p99", "itl_p99", "goodput")
"""The figures in which it may pay."""

NAMES: tuple[str, ...] = tuple(arrangement.name for arrangement in ARRANGEMENTS)

_TOGETHER = tuple(arrangement.name for arrangement in ARRANGEMENTS if not arrangement.is_apart)


@dataclass(frozen=True, slots=True)
class ApartFinding:
    """One load. outcomes: of each arrangement, named by it."""

    case: ApartCase
    outcomes: tuple[ContenderRuns, ...]

    def interval(self, name: str, metric: str) -> Interval:
        """Of an arrangement's figure, over the seeds."""
        return self._runs(name).intervals[metric]

    def best(self, metric: str, among: Sequence[str] = NAMES) -> str:
        """The arrangement of the best mean."""
        sign = -1 if METRIC[metric].more_is_better else 1
        return min(among, key=lambda name: sign * self.interval(name, metric).mean)

    def winners(self, metric: str) -> tuple[str, ...]:
        """The best, and those that the seeds do not tell from it."""
        best = self.best(metric)
        return tuple(
            name for name in NAMES if name == best or not self.difference(name, best, metric).excludes_zero
        )

    def difference(self, name: str, base: str, metric: str) -> Interval:
        """`name` less `base`, paired by seed."""
        return differences(self._runs(name), self._runs(base))[metric]

    def verdict(self, metric: str) -> str:
        """`apart`, `together`, or `even` where the seeds tell the better of each from neither."""
        apart = self.best(metric, [name for name in NAMES if name not in _TOGETHER])
        together = self.best(metric, _TOGETHER)
        found = self.difference(apart, together, metric)
        if not found.excludes_zero:
            return "even"
        return "apart" if (found.mean > 0) == bool(METRIC[metric].more_is_better) else "together"

    def to_json(self) -> dict[str, Any]:
        """Every figure of every run, and the verdicts."""
        recipe = self.case.recipe
        return {
            "load": self.case.name,
            "link_gbs": self.case.link_gbs,
            "recipe": asdict(recipe),
            "verdicts": {metric: self.verdict(metric) for metric in JUDGED},
            "arrangements": {
                runs.name: {
                    **{metric: asdict(self.interval(runs.name, metric)) for metric in JUDGED},
                    "runs": [dict(run) for run in runs.figures],
                }
                for runs in self.outcomes
            },
        }

    def _runs(self, name: str) -> ContenderRuns:
        return next(runs for runs in self.outcomes if runs.name == name)


def run_apart_study(
    machine: SimulatedMachine,
    seeds: Sequence[int],
    say: Callable[[str], None],
    cases: Sequence[ApartCase] = CASES,
) -> tuple[ApartFinding, ...]:
    """Every load on every seed. say: told of each, in words."""
    findings = []
    for case in cases:
        findings.append(run_apart_case(case, machine, seeds))
        verdicts = (f"{METRIC[metric].title} {findings[-1].verdict(metric)}" for metric in JUDGED)
        say(f"{case.name}: {', '.join(verdicts)}")
    return tuple(findings)


def run_apart_case(case: ApartCase, machine: SimulatedMachine, seeds: Sequence[int]) -> ApartFinding:
    """One load, on `machine`, in each arrangement."""
    workloads = {seed: case.recipe.make("study", seed) for seed in seeds}
    return ApartFinding(case, run_experiment(case.contenders(machine), workloads, SLO))


def render_apart(findings: Sequence[ApartFinding]) -> Group:
    """A table for each figure, a row for each load, winners in green."""
    tables = []
    for metric in JUDGED:
        table = Table(title=_title(metric), title_justify="left")
        for head in ("load", *NAMES, "pays"):
            table.add_column(head, justify="left" if head == "load" else "right", overflow="fold")
        for found in findings:
            winners = found.winners(metric)
            cells = [
                Text(_cell(found, name, metric), style="green" if name in winners else "") for name in NAMES
            ]
            table.add_row(found.case.name, *cells, found.verdict(metric))
        tables.append(table)
    return Group(*tables)


def apart_markdown(findings: Sequence[ApartFinding]) -> str:
    """The same for a file, winners in bold."""
    parts = []
    for metric in JUDGED:
        lines = [("load", *NAMES, "pays"), tuple("---" for _ in range(2 + len(NAMES)))]
        for found in findings:
            winners = found.winners(metric)
            cells = [_cell(found, name, metric) for name in NAMES]
            bold = [
                f"**{cell}**" if name in winners else cell for name, cell in zip(NAMES, cells, strict=True)
            ]
            lines.append((found.case.name, *bold, found.verdict(metric)))
        rows = "".join("| " + " | ".join(line) + " |\n" for line in lines)
        parts.append(f"{_title(metric)}:\n\n{rows}")
    return "\n".join(parts)


def write_apart_study(findings: Sequence[ApartFinding], setting: dict[str, Any], folder: Path) -> Path:
    """apart.json, apart.md, and a picture of gaps and of first tokens in `folder`; returns the first one's
    path."""
    from pageturner.service.simulator.plots import draw_ratios

    folder.mkdir(parents=True, exist_ok=True)
    document = {"setting": setting, "loads": [found.to_json() for found in findings]}
    (folder / "apart.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (folder / "apart.md").write_text(apart_markdown(findings), encoding="utf-8")
    for metric in ("ttft_p99", "itl_p99"):
        rows = [(f.case.name, {name: f.interval(name, metric).mean for name in NAMES}) for f in findings]
        label = f"times the best arrangement's {METRIC[metric].title}"
        picture = folder / f"apart-{metric.replace('_', '-')}.png"
        picture.write_bytes(draw_ratios(rows, label, "Prefill apart or together"))
    return picture


def _title(metric: str) -> str:
    found = METRIC[metric]
    title = "gap between two tokens p99" if metric == "itl_p99" else found.title
    return f"{title}, {found.unit}, ± 95 % interval over the seeds"


def _cell(found: ApartFinding, name: str, metric: str) -> str:
    interval = found.interval(name, metric)
    return f"{interval.mean:.3g} ± {interval.half_width or 0.0:.2g}"
