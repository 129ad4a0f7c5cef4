"""The soak by hand: `PYTHONPATH=tests python -m chaos --minutes 10 --json`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from support.model_folders import save_chat_model

from chaos.ledger import Ledger
from chaos.run import EVERYTHING, Report, run
from chaos.server import Figures

EMBEDDED_FLAGS = ("--dtype=auto",)
"""What it is served with: float32, as the small model is, would take a second a step."""

EPILOG = """examples:
  PYTHONPATH=tests python -m chaos --minutes 10 --json > chaos.json
  PYTHONPATH=tests python -m chaos --embedded --only "all kinds" -- --num-blocks=28 --max-model-len=384
"""


def main() -> int:
    """0 for a run without a problem."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m chaos", description=__doc__, epilog=EPILOG, formatter_class=raw
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="at least one round is run (default: 10)")
    parser.add_argument("--at-once", type=int, default=1, help="faults at the same time (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults and of their order (default: 0)")
    parser.add_argument("--only", metavar="WORD", help="faults whose name holds this word")
    parser.add_argument("--embedded", action="store_true", help="a server of the embedded model, quantised")
    parser.add_argument("--folder", type=Path, help="where the server's log is kept")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="flags of the server, behind `--`")
    parser.add_argument("--json", action="store_true", help="figures as JSON on standard output")
    arguments = parser.parse_args()
    names = [name for name in EVERYTHING if (arguments.only or "") in name]
    if not names:
        parser.error(f"--only: none of the faults holds {arguments.only!r}: {', '.join(EVERYTHING)}")
    errors = Console(stderr=True)
    began = time.monotonic()

    told = 0

    def progress(name: str, ledger: Ledger, figures: Figures) -> None:
        nonlocal told
        errors.print(
            f"{time.monotonic() - began:7.1f} s  {sum(ledger.faults.values()):5} faults  "
            f"{ledger.num_requests:7} requests  {figures.resident_bytes >> 20:5} MiB  "
            f"{figures.num_descriptors:4} descriptors  {len(ledger.problems)} problems  {name}",
            highlight=False,
            soft_wrap=True,
        )
        for problem in ledger.problems[told:]:
            errors.print(f"PROBLEM {problem}", highlight=False, markup=False, soft_wrap=True)
        told = len(ledger.problems)

    with tempfile.TemporaryDirectory() as temporary:
        embedded = arguments.embedded
        model = "embedded" if embedded else save_chat_model(Path(temporary) / "model")
        work = arguments.folder or Path(temporary) / "work"
        work.mkdir(exist_ok=True)
        report = asyncio.run(
            run(
                model,
                work,
                seed=arguments.seed,
                seconds=arguments.minutes * 60,
                names=names,
                at_once=arguments.at_once,
                flags=[*(EMBEDDED_FLAGS if embedded else ()), *arguments.flags],
                progress=progress,
            )
        )
    if arguments.json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        _show(report)
    return 1 if report.problems else 0


def _show(report: Report) -> None:
    table = Table("figure", "value", title=f"chaos, seed {report.seed}, {report.seconds:g} s")
    for name, value in (
        ("requests", report.num_requests),
        ("accepted", report.num_accepted),
        ("lost", report.num_lost),
        ("ends", ", ".join(f"{code} {count}" for code, count in report.codes.items())),
        ("faults", sum(report.faults.values())),
        ("MiB", f"{report.before.resident_bytes >> 20} -> {report.after.resident_bytes >> 20}"),
        ("descriptors", f"{report.before.num_descriptors} -> {report.after.num_descriptors}"),
        ("threads", f"{report.before.num_threads} -> {report.after.num_threads}"),
        ("problems", len(report.problems)),
    ):
        table.add_row(name, str(value))
    for name, count in report.faults.items():
        table.add_row(f"  {name}", str(count))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
