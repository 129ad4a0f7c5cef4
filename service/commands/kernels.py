"""`pageturner kernels`: what the CUDA kernels take of a GPU, read from their machine code. Needs no GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from pageturner.service.commands.output import show, write
from pageturner.service.config import cache_directory
from pageturner.service.errors import ConfigError, PageturnerError

if TYPE_CHECKING:
    from rich.table import Table

    from pageturner.kernels.cuda.report import Row

HELP = "compile the CUDA kernels, without a GPU, and hold them against their budgets"
EXAMPLE = "pageturner kernels --arch sm_90"
EXIT_OVER_BUDGET = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch",
        metavar="SM_XY,...",
        help="for which architectures (default: those that the budgets are stated for)",
    )
    parser.add_argument("--json", action="store_true", help="every figure of every kernel")


def run(arguments: argparse.Namespace) -> int:
    from pageturner.kernels.cuda import budgets, report, variants
    from pageturner.kernels.cuda.compiler import Compiler
    from pageturner.kernels.cuda.sass import find_nvdisasm
    from pageturner.kernels.errors import KernelsUnavailable

    archs = budgets.ARCHS if arguments.arch is None else _archs(arguments.arch)
    try:
        compiler, nvdisasm = Compiler(cache_directory()), find_nvdisasm()
        with _Progress() as progress:
            rows = report.inspect_kernels(compiler, nvdisasm, variants.shipped(), archs, progress.show)
    except KernelsUnavailable as error:
        raise PageturnerError(str(error)) from error
    if arguments.json:
        write(json.dumps({"nvrtc": compiler.version, "kernels": [asdict(row) for row in rows]}, indent=2))
    else:
        _print(rows, archs, compiler.version)
    return EXIT_OVER_BUDGET if any(row.violations for row in rows) else 0


def _archs(text: str) -> tuple[str, ...]:
    from pageturner.kernels.cuda.occupancy import MULTIPROCESSORS

    archs = tuple(dict.fromkeys(text.split(",")))
    for arch in archs:
        if arch not in MULTIPROCESSORS:
            raise ConfigError("--arch", f"{arch!r} is none of {', '.join(MULTIPROCESSORS)}")
    return archs


def _print(rows: Sequence[Row], archs: Sequence[str], version: str) -> None:
    for arch in archs:
        show(_table(arch, [row for row in rows if row.arch == arch]))
    over = [row for row in rows if row.violations]
    for row in over:
        reasons = "; ".join(row.violations)
        show(
            f"{row.arch} {row.expression}: {reasons}",
            style="red",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    show(f"NVRTC {version}: {len(rows) - len(over)} of {len(rows)} kernels are within their budgets.")


def _table(arch: str, rows: Sequence[Row]) -> Table:
    from rich import box
    from rich.table import Table

    caption = (
        "spill: bytes. shared: KiB of a block. blocks: of a multiprocessor.\n"
        "instr: of a tile of the main loop, shortest and all paths; else of the whole kernel"
    )
    table = Table(title=arch, title_justify="left", caption=caption, caption_justify="left")
    table.box, table.pad_edge, table.padding = box.SIMPLE_HEAD, False, (0, 1, 0, 0)
    table.add_column("kernel", no_wrap=True)
    for name in ("regs", "spill", "shared", "blocks", "instr"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in sorted(rows, key=lambda row: row.label.partition(" ")[0]):
        instructions = "none" if row.instructions is None else f"{row.instructions:,}"
        if row.loop:
            instructions = f"{row.shortest or 0:,}-{instructions}"
        table.add_row(
            row.label,
            str(row.registers),
            str(row.spill_bytes),
            f"{row.shared_bytes / 1024:.3g}",
            str(row.blocks),
            instructions,
            style="red" if row.violations else None,
        )
    return table


class _Progress:
    """A bar on standard error while files compile; nothing where that is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("compiling", total=None)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.stop()

    def show(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)
