"""`pageturner loadtest`: put load on a running server and say honestly how it bore it."""

from __future__ import annotations

import argparse
import json
import os
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pageturner.loadtest.errors import LoadtestError, OutputLost
from pageturner.loadtest.goodput import Objectives
from pageturner.loadtest.interruption import Interruption
from pageturner.loadtest.meter import ClientCost
from pageturner.loadtest.options import add_run_arguments, for_model, make_run
from pageturner.loadtest.report.document import FinishedRun, to_document
from pageturner.loadtest.report.tables import render
from pageturner.loadtest.runner import Run, execute
from pageturner.loadtest.server import ServedModel, discover
from pageturner.loadtest.statistics import summarize_run
from pageturner.loadtest.workload.shapes import plan_shapes

HELP = "put load on a running server and report latency and throughput"
EXAMPLE = "pageturner loadtest --workload chat --rate 4 --requests 200 --goodput ttft:500 itl:50"
EXIT_SOME_FAILED = 1
EXIT_USER_ERROR = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every flag, with its default in the help."""
    add_run_arguments(parser)
    group = parser.add_argument_group("what is told")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=(),
        metavar="NAME:MS",
        help="count requests that keep these objectives: ttft, tpot, itl (the longest pause), e2el",
    )
    group.add_argument(
        "--json", action="store_true", help="figures as JSON on standard output, tables on standard error"
    )


def run(arguments: argparse.Namespace) -> int:
    """0 if every request ended as the workload says or was shed, 1 if any failed, 2 if nothing could be run;
    128 and the signal's number if one ended the run early, with the figures of what had ended."""
    interruption = Interruption()
    try:
        planned = make_run(arguments)
        objectives = Objectives.parse(arguments.goodput)
        with interruption.watching():
            model = interruption.run(discover(planned.target, arguments.seed))
            if model is not None:
                planned = for_model(planned, model)
                finished = _run_with_progress(planned, model, objectives, interruption)
                _report(finished, as_json=arguments.json)
    except LoadtestError as error:
        sys.stderr.write(f"pageturner loadtest: {error}\n")
        return EXIT_USER_ERROR
    if interruption.number is not None:
        if model is None:
            sys.stderr.write("pageturner loadtest: ended before the first request was sent\n")
        return 128 + interruption.number
    return EXIT_SOME_FAILED if finished.summary.num_failed or finished.summary.num_cancelled else 0


def _run_with_progress(
    planned: Run, model: ServedModel, objectives: Objectives, interruption: Interruption
) -> FinishedRun:
    _, cuts = plan_shapes(planned.workload)
    costs: list[ClientCost] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=planned.workload.num_requests)
        records = execute(planned, lambda _: progress.advance(task), interruption, costs.append)
    summary = summarize_run(records, planned.workload.num_requests, objectives)
    return FinishedRun(planned, model, records, summary, cuts, costs)


def _report(finished: FinishedRun, *, as_json: bool) -> None:
    table = render(finished)
    if as_json:
        Console(stderr=True).print(table)
    try:
        if not as_json:
            Console().print(table)
        else:
            sys.stdout.write(json.dumps(to_document(finished), indent=2) + "\n")
            sys.stdout.flush()
    except BrokenPipeError:
        raise  # the reader has seen enough, as `head` does: no error
    except OSError as error:
        # Python would complain once more while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputLost(f"standard output: {error.strerror}") from error
