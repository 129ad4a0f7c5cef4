"""The comparison as a table for people, as JSON for programs, and as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from pageturner.loadtest.errors import OptionError
from pageturner.loadtest.peers.figures import Figures
from pageturner.loadtest.peers.machine import Machine
from pageturner.loadtest.peers.turns import Slice

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def table(found: Sequence[Figures], machine: Machine) -> Table:
    """A row an engine and case; ratios above 1 speak for the first engine."""
    base = found[0].engine
    features = " ".join(machine.features)
    shown = Table(
        title=f"{machine.processor}, {machine.num_processors} processors ({features})",
        caption=f"medians of rounds; {base} /: its output tokens/s over the row's, "
        "TTFT x: the row's TTFT p50 over its own; others: processors that the rest of the machine used",
    )
    shown.add_column("case")
    shown.add_column("engine")
    for column in ("rounds", "output tokens/s", f"{base} /", "TTFT p50 ms", "TTFT x", "ITL p50 ms", "others"):
        shown.add_column(column, justify="right")
    previous = None
    for row in found:
        shown.add_row(
            row.case.name if row.case != previous else "",
            row.engine,
            str(row.rounds),
            f"{row.output_tokens_per_second:,.1f}",
            f"{row.throughput_ratio:.2f}",
            f"{1e3 * row.ttft_p50:,.1f}",
            f"{row.ttft_ratio:.2f}",
            f"{1e3 * row.itl_p50:,.1f}",
            f"{row.other_cores:.2f}",
        )
        previous = row.case
    return shown


def to_json(
    found: Sequence[Figures], slices: Sequence[Slice], machine: Machine, commands: dict[str, str]
) -> dict[str, Any]:
    """The medians, and each slice that they are of. commands: how each engine was started."""
    return {
        "machine": dataclasses.asdict(machine),
        "commands": commands,
        "figures": [dataclasses.asdict(row) for row in found],
        "slices": [
            {
                "engine": each.engine,
                "case": each.case.name,
                "round": each.round,
                "other_cores": each.other_cores,
                "output_tokens_per_second": each.summary.output_tokens_per_second,
                **dataclasses.asdict(each.summary),
            }
            for each in slices
        ],
    }


def write_plot(found: Sequence[Figures], file: Path) -> None:
    """Three panels of bars; the format is that of the file's name. Raises OptionError without matplotlib
    (the extra `lab`), or where the file cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError("plot", f"needs matplotlib: pip install 'pageturner[lab]' ({error})") from error
    picture = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(picture)
    _bars(picture.add_subplot(1, 3, 1), "output tokens/s", found, [r.output_tokens_per_second for r in found])
    _bars(picture.add_subplot(1, 3, 2), "TTFT p50, ms", found, [1e3 * row.ttft_p50 for row in found])
    _bars(picture.add_subplot(1, 3, 3), "ITL p50, ms", found, [1e3 * row.itl_p50 for row in found])
    try:
        picture.savefig(file, dpi=110)
    except (OSError, ValueError) as error:
        raise OptionError("plot", f"{file}: {error}") from error


def _bars(axes: Axes, title: str, found: Sequence[Figures], heights: Sequence[float]) -> None:
    """A group of bars a case, a bar an engine; logarithmic, since cases differ by orders."""
    cases = list(dict.fromkeys(row.case for row in found))
    engines = list(dict.fromkeys(row.engine for row in found))
    width = 0.8 / len(engines)
    for number, engine in enumerate(engines):
        at = [
            (cases.index(row.case) + (number - (len(engines) - 1) / 2) * width, height)
            for row, height in zip(found, heights, strict=True)
            if row.engine == engine
        ]
        axes.bar([x for x, _ in at], [y for _, y in at], width, label=engine)
    axes.set_xticks(range(len(cases)), [case.name for case in cases])
    axes.set_yscale("log")
    axes.set_title(title)
    axes.legend(fontsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
