"""The kernels' figures as a picture: how near each call comes to what the machine can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pageturner.service.bench.attention_cases import Case
from pageturner.service.errors import PageturnerError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def panel_of(case: Case) -> str:
    return f"{case.kind}, {case.heads.model}"


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
