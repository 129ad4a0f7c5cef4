"""An experiment as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pageturner.service.simulator.experiment import ContenderRuns, differences
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
    *("draft_share", "accepted_share"),
    *("handed_share", "failed_handovers"),
    *("prefix_hit_share", "kv_occupancy", "kv_waste", "imbalance", "fairness_gap"),
    *("deadline_misses", "failed"),
)
"""Metrics of the table; the JSON has all."""

MAX_HEAD = 24
"""Characters of a set's name that still heads a column."""


def render(outcomes: Sequence[ContenderRuns]) -> RenderableType:
    """Means with the half width of their interval; below, paired differences from the first contender.

    Columns are headed by the sets' names, or by numbers, told above, where a name is too long for a column.
    """
    names = [outcome.name for outcome in outcomes]
    parts: list[RenderableType] = []
    heads = names
    if max(map(len, names)) > MAX_HEAD:
        heads = [str(number) for number in range(1, len(names) + 1)]
        parts += [Text(f"{head}: {name}") for head, name in zip(heads, names, strict=True)]
    num_runs = len(outcomes[0].figures)
    title = f"mean over {num_runs} seeds, ± 95 % interval" if num_runs > 1 else "one run of each set"
    intervals = [outcome.intervals for outcome in outcomes]
    parts.append(_table(title, heads, {n: [_cell(found.get(n)) for found in intervals] for n in SHOWN}))
    if len(outcomes) > 1:
        found = [differences(outcome, outcomes[0]) for outcome in outcomes[1:]]
        title = f"difference from {heads[0]}" + (", paired by seed" if num_runs > 1 else "")
        cells = {n: [_difference(n, each.get(n)) for each in found] for n in SHOWN}
        paired = _table(title, heads[1:], cells)
        parts.append(paired if paired.row_count else _no_difference(outcomes))
    return Group(*parts)


def _no_difference(outcomes: Sequence[ContenderRuns]) -> str:
    said = "No run of any other set differs in any of these figures."
    if any(run["preemptions"] or "imbalance" in run for outcome in outcomes for run in outcome.figures):
        return said
    return (
        f"{said} No request was preempted, so no victim and no reclaim policy was asked; "
        "a smaller pool (--sweep cache.num_blocks=N) asks them."
    )


def _table(title: str, heads: Sequence[str], cells: Mapping[str, Sequence[str]]) -> Table:
    """cells: by the name of a metric, a row each; one of nothing but zeros is left out."""
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for head in heads:
        table.add_column(Text(head), justify="right", overflow="fold")
    for name, row in cells.items():
        if any(cell not in ("0", "-") for cell in row):
            table.add_row(_label(name), *row)
    return table


def to_json(outcomes: Sequence[ContenderRuns], setting: Mapping[str, Any]) -> dict[str, Any]:
    """setting: what was run, as the caller knows it."""
    return {
        "setting": dict(setting),
        "contenders": [
            {
                "name": outcome.name,
                "runs": [dict(run) for run in outcome.figures],
                "metrics": {name: interval_json(found) for name, found in outcome.intervals.items()},
                "differences": {
                    name: {**interval_json(found), "excludes_zero": found.excludes_zero}
                    for name, found in differences(outcome, outcomes[0]).items()
                }
                if index
                else {},
                "samples": [asdict(sample) for sample in outcome.samples],
            }
            for index, outcome in enumerate(outcomes)
        ],
    }


def interval_json(found: Interval) -> dict[str, Any]:
    """low, high: null for one seed, which has no interval."""
    if found.half_width is None:
        return {"mean": found.mean, "low": None, "high": None, "num_seeds": found.num_seeds}
    return asdict(found)


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
    return f"{number(found.mean)} ± {number(found.half_width)}" if found.half_width else number(found.mean)


def _difference(name: str, found: Interval | None) -> str:
    if found is None or found.low == found.high == 0:
        return "-" if found is None else "0"
    if found.half_width is None:
        return f"{found.mean:+.4g}"
    text = f"{found.mean:+.4g} [{number(found.low)}, {number(found.high)}]"
    better = METRIC[name].more_is_better
    if not found.excludes_zero or better is None:
        return text
    return f"[{'green' if (found.mean > 0) == better else 'red'}]{text}[/]"
