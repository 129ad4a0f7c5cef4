"""Runs as pictures: SVG text that a page can hold. Only this file draws."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pageturner.loadtest.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LATENCIES = (
    ("ttft", "time to first token"),
    ("tpot", "time per output token"),
    ("itl", "pause between messages"),
    ("e2el", "time to the last token"),
)
_MEBIBYTE = float(1 << 20)


@dataclass(frozen=True, slots=True)
class NamedRun:
    """A run to be shown. document: as `to_document` makes it, and as JSON reads it again."""

    name: str
    document: Mapping[str, Any]

    def load(self, column: str) -> Sequence[float]:
        """A column of the server's load over time; empty where it told none."""
        found: Sequence[float] = self.document["over_time"]["load"].get(column, ())
        return found


Draw = Callable[["Axes", NamedRun, str], bool]
"""Draw a run in a colour, if it has what is to be drawn."""


def check_matplotlib() -> None:
    """Raises OptionError without it: the extra `lab` brings it."""
    try:
        import matplotlib.figure  # noqa: F401  # whether it is there is the question
    except ImportError as error:
        raise OptionError("report", f"needs matplotlib: pip install 'pageturner[lab]' ({error})") from error


def pictures(runs: Sequence[NamedRun]) -> list[tuple[str, str]]:
    """A title and an SVG for each picture that any of the runs has something for."""
    drawn = [(title, _svg(panels, runs)) for title, panels in _PICTURES]
    return [(title, svg) for title, svg in drawn if svg]


@dataclass(frozen=True, slots=True)
class _Panel:
    """One pair of axes. across, up: their names. is_log: of the axis across. top: of the axis up, which
    begins at 0; None for as high as the figures go."""

    draw: Draw
    across: str
    up: str
    is_log: bool = False
    top: float | None = None


def _svg(panels: Sequence[_Panel], runs: Sequence[NamedRun]) -> str:
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # Text stays text, and the ids in the file are the same for the same figures.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pageturner"}):
        rows = -(-len(panels) // 2)
        width = 10 if len(panels) > 1 else 7.5
        figure = Figure(figsize=(width, 3.2 * rows), layout="constrained")
        FigureCanvasSVG(figure)
        has_any = False
        for number, panel in enumerate(panels, 1):
            axes = figure.add_subplot(rows, min(2, len(panels)), number)
            has_any |= _fill(axes, panel, runs)
        if not has_any:
            return ""
        handles, labels = figure.axes[0].get_legend_handles_labels()
        named = dict(zip(labels, handles, strict=True))
        if len(named) > 1:
            figure.legend(
                named.values(), named.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=9
            )
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    # What stands before the picture is for files, not for pages.
    return re.sub(r"^.*?(?=<svg)", "", file.getvalue(), flags=re.DOTALL)


def _fill(axes: Axes, panel: _Panel, runs: Sequence[NamedRun]) -> bool:
    has_any = [panel.draw(axes, run, f"C{number % 10}") for number, run in enumerate(runs)]
    if panel.is_log and any(has_any):
        axes.set_xscale("log")
    axes.set_ylim(0, panel.top)  # after all is drawn, or what is drawn later would be cut off
    axes.set_xlabel(panel.across)
    axes.set_ylabel(panel.up)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return any(has_any)


def _safe(name: str) -> str:
    """matplotlib reads a pair of dollar signs as mathematics, and hides labels that begin with an
    underscore."""
    return (
        name.replace("$", r"\$").replace("_", "\u2009_", 1)
        if name.startswith("_")
        else name.replace("$", r"\$")
    )


def _distribution(measure: str) -> Draw:
    def draw(axes: Axes, run: NamedRun, colour: str) -> bool:
        found = run.document["distributions"]
        if measure not in found:
            return False
        milliseconds = [max(1e-3, 1e3 * seconds) for seconds in found[measure]]
        axes.plot(milliseconds, found["shares"], color=colour, label=_safe(run.name))
        return True

    return draw


def _throughput(axes: Axes, run: NamedRun, colour: str) -> bool:
    found = run.document["over_time"]["output"]
    axes.plot(found["seconds"], found["output_tokens_per_second"], color=colour, label=_safe(run.name))
    return bool(found["seconds"])


def _over_time(column: str, scale: float = 1.0, style: str = "-", *, since_start: bool = False) -> Draw:
    """since_start: the column counts; what it had before the run is taken off."""

    def draw(axes: Axes, run: NamedRun, colour: str) -> bool:
        values = run.load(column)
        if not any(values):
            return False
        first = values[0] if since_start else 0.0
        scaled = [(value - first) / scale for value in values]
        label = _safe(run.name) if style == "-" else None
        axes.plot(run.load("seconds"), scaled, style, color=colour, label=label)
        return True

    return draw


def _both(one: Draw, other: Draw) -> Draw:
    def draw(axes: Axes, run: NamedRun, colour: str) -> bool:
        drawn = one(axes, run, colour)
        return other(axes, run, colour) or drawn

    return draw


def _blocks(axes: Axes, run: NamedRun, colour: str) -> bool:
    total = run.load("num_blocks")
    if not any(total):
        return False
    used, cached = run.load("num_blocks_used"), run.load("num_blocks_evictable")
    seconds = run.load("seconds")
    axes.plot(seconds, [u / t for u, t in zip(used, total, strict=True)], color=colour, label=_safe(run.name))
    held = [(u + c) / t for u, c, t in zip(used, cached, total, strict=True)]
    axes.plot(seconds, held, ":", color=colour)
    return True


def _preemptions(axes: Axes, run: NamedRun, colour: str) -> bool:
    kinds = [run.load(f"num_{kind}_preemptions") for kind in ("swap", "recompute", "tail")]
    if not all(kinds):
        return False
    totals = [sum(each) for each in zip(*kinds, strict=True)]
    axes.plot(
        run.load("seconds"), [total - totals[0] for total in totals], color=colour, label=_safe(run.name)
    )
    return True


def _knee(axes: Axes, run: NamedRun, colour: str) -> bool:
    knee = run.document.get("knee")
    if not knee or not knee["probes"]:
        return False
    probes = sorted(knee["probes"], key=lambda probe: probe["rate"])
    rates, shares = [p["rate"] for p in probes], [p["share"] for p in probes]
    below = [p["share"] - p["low"] for p in probes]
    above = [p["high"] - p["share"] for p in probes]
    axes.errorbar(
        rates, shares, yerr=[below, above], fmt="o-", color=colour, capsize=3, label=_safe(run.name)
    )
    axes.axhline(knee["options"]["share"], color=colour, linestyle=":")
    if knee["rate"] is not None:
        axes.axvline(knee["rate"], color=colour, linestyle=":")
    return True


_SECONDS = "seconds after the first request was due"
_PICTURES: tuple[tuple[str, tuple[_Panel, ...]], ...] = (
    (
        "Latencies: share of requests (of pauses) that took at most so long",
        tuple(_Panel(_distribution(name), f"{said}, ms", "share", True, 1.02) for name, said in _LATENCIES),
    ),
    (
        "Goodput over the rate",
        (_Panel(_knee, "arrivals a second", "share of requests that were good", True, 1.05),),
    ),
    ("Throughput", (_Panel(_throughput, _SECONDS, "output tokens a second"),)),
    (
        "Requests that run (line) and wait (dotted)",
        (
            _Panel(
                _both(_over_time("num_running"), _over_time("num_waiting", style=":")), _SECONDS, "requests"
            ),
        ),
    ),
    (
        "KV blocks that requests hold (line), and with those that are cached (dotted)",
        (_Panel(_blocks, _SECONDS, "share of the pool", top=1.02),),
    ),
    ("Preemptions", (_Panel(_preemptions, _SECONDS, "preemptions since the start"),)),
    (
        "The server's memory and processor time",
        (
            _Panel(_over_time("resident_bytes", _MEBIBYTE), _SECONDS, "resident, MiB"),
            _Panel(
                _over_time("cpu_seconds", since_start=True), _SECONDS, "processor seconds since the start"
            ),
        ),
    ),
)
