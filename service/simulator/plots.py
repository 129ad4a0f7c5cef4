"""An experiment as PNG files and one page that holds them all. Only this file uses matplotlib."""

from __future__ import annotations

import base64
import html
import io
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pageturner.service.simulator.errors import WorkloadError
from pageturner.service.simulator.experiment import ContenderRuns
from pageturner.service.simulator.figures import METRIC, Interval
from pageturner.service.simulator.report import SHOWN, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Draw = Callable[["Axes", Sequence[ContenderRuns]], None]

_LABEL_WIDTH = 34
"""Characters of a line of a set's name: a third of a picture's width, so that the plot keeps the rest."""

_LEGEND_WIDTH = 100
"""The same of a legend, which has the whole width."""

_LINE_INCHES = 0.18
"""Height of a line of a name."""

_STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse }
td, th { padding: .25em .8em; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left } img { max-width: 100% } pre { overflow: auto }"""


def write_plots(outcomes: Sequence[ContenderRuns], document: Mapping[str, Any], folder: Path) -> Path:
    """PNG files and page.html in `folder`, which is made if it is not there; returns the page's path.

    The page needs no other file and no network. document: the experiment's JSON, shown at its end.
    Raises WorkloadError without matplotlib (the extra `lab`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for name, title, draw in _known(outcomes):
        drawn[title] = _png(draw, title, outcomes)
        (folder / f"{name}.png").write_bytes(drawn[title])
    page = folder / "page.html"
    page.write_text(_page(outcomes, document, drawn), encoding="utf-8")
    return page


def draw_gains(gains: Sequence[tuple[str, str, Interval, bool]]) -> bytes:
    """A PNG of (policy, figure, gain, is it a win) with intervals, each a row."""

    def draw(axes: Axes, _: Sequence[ContenderRuns]) -> None:
        for row, (_policy, _figure, gain, is_win) in enumerate(gains):
            axes.errorbar(
                [gain.mean * 100],
                [row],
                xerr=[[(gain.mean - gain.low) * 100], [(gain.high - gain.mean) * 100]],
                fmt="o",
                color="C2" if is_win else "C7",
                capsize=3,
            )
        axes.set_yticks(
            range(len(gains)), [f"{policy} ({figure})" for policy, figure, _, _ in gains], fontsize=7
        )
        axes.axvline(0, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_xlabel("better than the axis's default by, %")

    return _png(draw, "Each built-in where it wins", (), height=1 + len(gains) / 4)


def draw_ratios(
    rows: Sequence[tuple[str, Mapping[str, float]]], label: str, title: str = "Routing policies by setting"
) -> bytes:
    """A PNG of (setting, figure by policy), each a row of dots: how many times the best one's figure."""

    def draw(axes: Axes, _: Sequence[ContenderRuns]) -> None:
        for index, name in enumerate(rows[0][1]):
            ratios = [found[name] / min(found.values()) for _, found in rows]
            axes.plot(ratios, range(len(rows)), "o", label=name, color=f"C{index}", alpha=0.8)
        axes.set_yticks(range(len(rows)), [setting for setting, _ in rows])
        axes.axvline(1, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlabel(label)

    return _png(draw, title, (), height=1.5 + len(rows) / 3)


def check_matplotlib() -> None:
    """Raises WorkloadError without it: the extra `lab` brings it."""
    try:
        import matplotlib.figure  # noqa: F401  # whether it is there is the question
    except ImportError as error:
        raise WorkloadError(f"plots need matplotlib: pip install 'pageturner[lab]' ({error})") from error


def pictures(outcomes: Sequence[ContenderRuns]) -> tuple[tuple[str, Draw], ...]:
    """The title of each picture of an experiment, and what draws it."""
    return tuple((title, draw) for _, title, draw in _known(outcomes))


def draw_figure(draw: Draw, title: str, outcomes: Sequence[ContenderRuns], height: float = 4) -> Figure:
    """height: of the plot itself, in inches; names that need lines of their own add to it. Raises
    WorkloadError without matplotlib."""
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_lines = sum(_label(outcome.name).count("\n") + 1 for outcome in outcomes)
    figure = Figure(figsize=(9, height + _LINE_INCHES * num_lines), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title)
    draw(axes, outcomes)
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        # Below the axes, where it covers no curve.
        figure.legend(handles, labels, loc="outside lower left", fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def _png(draw: Draw, title: str, outcomes: Sequence[ContenderRuns], height: float = 4) -> bytes:
    file = io.BytesIO()
    # No date and no version in it: the same experiment gives the same bytes.
    figure = draw_figure(draw, title, outcomes, height)
    figure.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return file.getvalue()


def _label(name: str, width: int = _LABEL_WIDTH) -> str:
    """The whole name, over as many lines as it needs: a set at its semicolons, and what is longer still."""
    lines: list[str] = []
    for part in name.split(";"):
        if lines and len(lines[-1]) + 1 + len(part) <= width:
            lines[-1] += f";{part}"
            continue
        if lines:
            lines[-1] += ";"
        lines += textwrap.wrap(part, width) or [part]
    # matplotlib reads a pair of dollar signs as mathematics.
    return "\n".join(lines).replace("$", r"\$")


def _ttft_distribution(axes: Axes, outcomes: Sequence[ContenderRuns]) -> None:
    for outcome in outcomes:
        count = len(outcome.ttfts)
        shares = [(i + 1) / count for i in range(count)]
        axes.plot(outcome.ttfts, shares, label=_label(outcome.name, _LEGEND_WIDTH))
    axes.set_xscale("log")
    axes.set_xlabel("seconds to the first token")
    axes.set_ylabel("share of requests")


def _over_time(attribute: str, label: str) -> Draw:
    def draw(axes: Axes, outcomes: Sequence[ContenderRuns]) -> None:
        for outcome in outcomes:
            times = [sample.at for sample in outcome.samples]
            values = [getattr(sample, attribute) for sample in outcome.samples]
            axes.plot(times, values, label=_label(outcome.name, _LEGEND_WIDTH), linewidth=1)
        axes.set_xlabel("virtual seconds")
        axes.set_ylabel(label)

    return draw


def _bars(name: str) -> Draw:
    def draw(axes: Axes, outcomes: Sequence[ContenderRuns]) -> None:
        found = [outcome.intervals.get(name) for outcome in outcomes]
        known = [(o.name, i) for o, i in zip(outcomes, found, strict=True) if i is not None]
        axes.barh(
            range(len(known)), [i.mean for _, i in known], color=[f"C{n % 10}" for n in range(len(known))]
        )
        for row, (_, i) in enumerate(known):
            if i.half_width is not None:
                axes.errorbar([i.mean], [row], xerr=[i.half_width], fmt="none", ecolor="black", capsize=3)
        _name_rows(axes, [label for label, _ in known])
        axes.set_xlim(left=0)
        axes.set_xlabel(f"{METRIC[name].title} {METRIC[name].unit}".strip())

    return draw


def _preemptions(axes: Axes, outcomes: Sequence[ContenderRuns]) -> None:
    left = [0.0] * len(outcomes)
    for kind in ("swap", "recompute", "tail"):
        means = [outcome.intervals[f"{kind}_preemptions"].mean for outcome in outcomes]
        axes.barh(range(len(outcomes)), means, left=left, label=kind)
        left = [a + b for a, b in zip(left, means, strict=True)]
    _name_rows(axes, [outcome.name for outcome in outcomes])
    axes.set_xlabel("preemptions, mean of seeds")


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """A row for each set, the first on top."""
    axes.set_yticks(range(len(names)), [_label(name) for name in names])
    axes.invert_yaxis()


_PICTURES: tuple[tuple[str, str, Draw], ...] = (
    ("ttft", "Time to first token", _ttft_distribution),
    ("tpot", "Time per output token, p99", _bars("tpot_p99")),
    ("goodput", "Goodput under the SLOs", _bars("goodput")),
    ("throughput", "Output tokens per second", _bars("throughput")),
    ("hits", "Prompt tokens found in the prefix cache", _bars("prefix_hit_share")),
    ("imbalance", "Work of the busiest server", _bars("imbalance")),
    ("preemptions", "Preemptions by kind", _preemptions),
    ("recompute_tax", "Recompute tax", _bars("recompute_tax")),
    ("occupancy", "KV blocks in use", _over_time("used_share", "share of the pool")),
    ("waste", "KV slots held and not filled", _over_time("wasted_share", "share of the slots in use")),
    ("waiting", "Requests waiting", _over_time("num_waiting", "requests")),
    ("fairness", "Fairness gap between tenants", _bars("fairness_gap")),
)


def _known(outcomes: Sequence[ContenderRuns]) -> tuple[tuple[str, str, Draw], ...]:
    """The pictures for which there are figures: fleets have no samples of pools, one server no balance."""
    has_samples = any(outcome.samples for outcome in outcomes)
    metrics = set().union(*(outcome.intervals for outcome in outcomes))

    def is_known(name: str) -> bool:
        if name in ("occupancy", "waste", "waiting"):
            return has_samples
        needed = {"preemptions": "swap_preemptions", "fairness": "fairness_gap"}.get(name, name)
        return needed in metrics or needed not in METRIC

    return tuple(picture for picture in _PICTURES if is_known(picture[0]))


def _page(
    outcomes: Sequence[ContenderRuns], document: Mapping[str, Any], pictures: Mapping[str, bytes]
) -> str:
    heads = "".join(f"<th>{html.escape(outcome.name)}</th>" for outcome in outcomes)
    rows = "\n".join(_row(name, outcomes) for name in SHOWN)
    table = f"<table><tr><th></th>{heads}</tr>\n{rows}\n</table>"
    runs = html.escape(json.dumps(document, indent=1))
    tail = f"<details><summary>Every figure of every run</summary><pre>{runs}</pre></details>"
    return embed("Simulation", document["setting"], table, pictures, tail)


def embed(
    title: str, setting: Mapping[str, Any], table: str, pictures: Mapping[str, bytes], tail: str = ""
) -> str:
    """One HTML page that needs no other file. table, tail: HTML."""
    said = ", ".join(
        f"{name} {'; '.join(value) if isinstance(value, tuple) else value}"
        for name, value in setting.items()
        if value is not None
    )
    images = "\n".join(
        f'<h2>{html.escape(name)}</h2>\n<img alt="{html.escape(name)}" '
        f'src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        for name, png in pictures.items()
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Pageturner: {title}</title><style>{_STYLE}</style>
<h1>{title}</h1><p>{html.escape(said)}. Means over seeds; intervals are of 95 %.</p>
{table}
{images}
{tail}
</html>
"""


def _cell(found: Interval | None) -> str:
    if found is None:
        return "-"
    width = found.half_width
    return number(found.mean) if width is None else f"{number(found.mean)} ± {number(width)}"


def _row(name: str, outcomes: Sequence[ContenderRuns]) -> str:
    cells = []
    for outcome in outcomes:
        found = outcome.intervals.get(name)
        cells.append(f"<td>{_cell(found)}</td>")
    title = html.escape(f"{METRIC[name].title} {METRIC[name].unit}".strip())
    return f"<tr><td>{title}</td>{''.join(cells)}</tr>"
