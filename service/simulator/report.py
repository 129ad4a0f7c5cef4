"""An experiment as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from pageturner.service.simulator.experiment import Outcome, differences
from pageturner.service.simulator.figures import METRIC, Interval

SHOWN = (
    *(
        "throughput",
        "goodput",
        "ttft_p50",
        "ttft_p99",
        "tpot_p50",
        "tpot_p99",
        "itl_p99",
        "e2e_p50",
        "e2e_p99",
    ),
    *("preemptions", "swap_preemptions", "recompute_preemptions", "tail_preemptions", "recompute_tax"),
    *("prefix_hit_share", "kv_occupancy", "kv_waste", "fairness_gap", "deadline_misses", "failed"),
)
"""Metrics of the table; the JSON has all."""


def render(outcomes: Sequence[Outcome]) -> RenderableType:
    """Means with the half width of their interval; below, paired differences from the first contender."""
    table = Table(title="mean over seeds, ± 95 % interval", title_justify="left")
    table.add_column("")
    for outcome in outcomes:
        table.add_column(outcome.name, justify="right", overflow="fold")
    intervals = [outcome.intervals for outcome in outcomes]
    for name in SHOWN:
        cells = [_cell(found.get(name)) for found in intervals]
        if any(cell not in ("0", "-") for cell in cells):
            table.add_row(_label(name), *cells)
    if len(outcomes) == 1:
        return table
    paired = Table(title=f"difference from {outcomes[0].name}, paired by seed", title_justify="left")
    paired.add_column("")
    for outcome in outcomes[1:]:
        paired.add_column(outcome.name, justify="right", overflow="fold")
    rows = [differences(outcome, outcomes[0]) for outcome in outcomes[1:]]
    for name in SHOWN:
        cells = [_difference(name, found.get(name)) for found in rows]
        if any(cell not in ("0", "-") for cell in cells):
            paired.add_row(_label(name), *cells)
    if not paired.row_count:
        return Group(table, "No run of any other set differs in any of these figures.")
    return Group(table, paired)


def to_json(outcomes: Sequence[Outcome], setting: Mapping[str, Any]) -> dict[str, Any]:
    """setting: what was run, as the caller knows it."""
    return {
        "setting": dict(setting),
        "contenders": [
            {
                "name": outcome.name,
                "runs": [dict(run) for run in outcome.figures],
                "metrics": {name: asdict(found) for name, found in outcome.intervals.items()},
                "differences": {
                    name: {**asdict(found), "excludes_zero": found.excludes_zero}
                    for name, found in differences(outcome, outcomes[0]).items()
                }
                if index
                else {},
                "samples": [asdict(sample) for sample in outcome.samples],
            }
            for index, outcome in enumerate(outcomes)
        ],
    }


def number(value: float) -> str:
    """Four digits that tell, whatever the size."""
    if value == 0:
        return "0"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _label(name: str) -> str:
    metric = METRIC[name]
    return f"{metric.title} [dim]{metric.unit}[/]" if metric.unit else metric.title


def _cell(found: Interval | None) -> str:
    if found is None:
        return "-"
    half = (found.high - found.low) / 2
    return f"{number(found.mean)} ± {number(half)}" if half else number(found.mean)


def _difference(name: str, found: Interval | None) -> str:
    if found is None or found.low == found.high == 0:
        return "-" if found is None else "0"
    text = f"{found.mean:+.4g} [{number(found.low)}, {number(found.high)}]"
    better = METRIC[name].more_is_better
    if not found.excludes_zero or better is None:
        return text
    return f"[{'green' if (found.mean > 0) == better else 'red'}]{text}[/]"
