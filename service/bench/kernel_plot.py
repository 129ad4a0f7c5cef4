"""The kernels' figures as a picture: how near each call comes to what the machine can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pageturner.service.bench.attention_cases import Case
from pageturner.service.errors import PageturnerError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from pageturner.service.bench.kernel_report import Estimated, Measured

Scale = Literal["linear", "log"]
Series = Mapping[str, Sequence[tuple[int, float]]]
"""Label -> (context, figure) points."""


def write_plot(panels: Mapping[str, Series], label: str, file: Path, *, scale: Scale = "linear") -> None:
    """One panel a key, contexts along x, a line a series; the format is that of the file's name.

    scale: of the figures. Raises PageturnerError without matplotlib (the extra `lab`), or if the file
    cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PageturnerError(f"plots need matplotlib: pip install 'pageturner[lab]' ({error})") from error
    figure = Figure(figsize=(6 * len(panels), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for index, (title, series) in enumerate(panels.items(), start=1):
        _draw(figure.add_subplot(1, len(panels), index), title, label, series, scale)
    try:
        figure.savefig(file, dpi=110)
    except (OSError, ValueError) as error:
        raise PageturnerError(f"{file}: {error}") from error


def measured_panels(found: Measured) -> dict[str, Series]:
    """A line a contender: of decodes, those of the largest batch."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for result in found.results:
        for timing in result.timings:
            fraction = result.fraction(timing, found.machine)
            if fraction is not None and result.case.batch == _largest_batch(found, result.case):
                line = panels.setdefault(_panel_of(result.case), {}).setdefault(timing.contender, [])
                line.append((result.case.context, fraction))
    return dict(panels)


def paper_panels(found: Estimated) -> dict[str, Series]:
    """Microseconds of the estimate by context, a panel for each kind of case and a line for each batch."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for estimate in found.estimates:
        case = estimate.case
        line = panels.setdefault(_panel_of(case), {}).setdefault(f"batch {case.batch}", [])
        line.append((case.context, estimate.seconds * 1e6))
    return dict(panels)


def _panel_of(case: Case) -> str:
    return f"{case.kind}, {case.heads.model}"


def _largest_batch(found: Measured, like: Case) -> int:
    """Measured for that kind, model and context."""
    return max(
        result.case.batch
        for result in found.results
        if result.timings
        and (result.case.kind, result.case.heads, result.case.context)
        == (like.kind, like.heads, like.context)
    )


def _draw(axes: Axes, title: str, label: str, series: Series, scale: Scale) -> None:
    for name, points in series.items():
        ordered = sorted(points)
        axes.plot([x for x, _ in ordered], [y for _, y in ordered], marker="o", markersize=3, label=name)
    axes.set_title(title)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel(label)
    axes.set_yscale(scale)
    if scale == "linear":
        axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
