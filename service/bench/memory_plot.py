"""The memory study as a picture: what becomes of the budget, what it yields, what block sizes waste."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pageturner.service.bench.memory import MemoryReport
from pageturner.service.errors import PageturnerError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PARTS = (("tokens", "C2"), ("reserved", "C0"), ("unused", "C3"), ("free", "C7"))


def check_plot(file: Path) -> None:
    """Raises PageturnerError without matplotlib (the extra `lab`), or where the file's folder is missing."""
    try:
        import matplotlib.figure  # noqa: F401  # whether it is there is the question
    except ImportError as error:
        raise PageturnerError(f"plots need matplotlib: pip install 'pageturner[lab]' ({error})") from error
    if not file.resolve().parent.is_dir():
        raise PageturnerError(f"{file}: there is no folder {file.parent}")


def write_plot(report: MemoryReport, file: Path) -> None:
    """Three panels; the format is that of the file's name. Raises PageturnerError as `check_plot` does, and
    if the file cannot be written."""
    check_plot(file)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for index, draw in enumerate((_draw_use, _draw_throughput, _draw_block_sizes), start=1):
        draw(figure.add_subplot(1, 3, index), report)
    try:
        figure.savefig(file, dpi=110)
    except (OSError, ValueError) as error:
        raise PageturnerError(f"{file}: {error}") from error


def _draw_use(axes: Axes, report: MemoryReport) -> None:
    names = [run.name for run in report.contenders]
    bottom = [0.0] * len(names)
    for part, colour in _PARTS:
        shares = [100 * getattr(run.use, part) for run in report.contenders]
        axes.bar(names, shares, bottom=bottom, label=part, color=colour)
        bottom = [below + share for below, share in zip(bottom, shares, strict=True)]
    axes.set_title("KV slots while requests wait")
    axes.set_ylabel("% of the pool")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=len(_PARTS), frameon=False)


def _draw_throughput(axes: Axes, report: MemoryReport) -> None:
    for run in report.contenders:
        axes.scatter([run.batch], [run.tokens_per_second], label=run.name)
    axes.set_title("What the same budget yields")
    axes.set_xlabel("sequences at once")
    axes.set_ylabel("output tokens/s")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend()


def _draw_block_sizes(axes: Axes, report: MemoryReport) -> None:
    sizes = [run.block_size for run in report.block_sizes]
    axes.plot(sizes, [100 * (1 - run.use.useful) for run in report.block_sizes], marker="o")
    axes.set_xscale("log", base=2)
    axes.set_title("Waste by block size")
    axes.set_xlabel("tokens of a block")
    axes.set_ylabel("% of what is set aside")
    axes.set_ylim(bottom=0)
