"""`pageturner loadtest`: put load on a running server and say honestly how it bore it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from rich.console import Console

from pageturner.loadtest.errors import LoadtestError, OptionError, OutputLost
from pageturner.loadtest.goodput import Objectives
from pageturner.loadtest.interruption import Interruption
from pageturner.loadtest.knee import KneeOptions
from pageturner.loadtest.measuring import measure, search
from pageturner.loadtest.options import add_run_arguments, for_model, make_run
from pageturner.loadtest.report.document import FinishedRun, to_document
from pageturner.loadtest.report.page import check_page, read_runs, write_page
from pageturner.loadtest.report.plots import NamedRun
from pageturner.loadtest.report.tables import render
from pageturner.loadtest.runner import Run
from pageturner.loadtest.server import discover
from pageturner.loadtest.workload.arrivals import RandomArrivals

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
        "--report",
        type=Path,
        metavar="FILE.html",
        help="also write a page with pictures, which needs no other file",
    )
    group.add_argument(
        "--json", action="store_true", help="figures as JSON on standard output, tables on standard error"
    )

    search = parser.add_argument_group("the highest rate that keeps the objectives")
    search.add_argument(
        "--find-knee",
        action="store_true",
        help="search for it from --rate on (1); --requests or more are sent at each rate, up to three times",
    )
    search.add_argument(
        "--knee-share",
        type=float,
        default=0.9,
        metavar="P",
        help="of the requests that must be good (%(default)s)",
    )
    search.add_argument(
        "--knee-precision",
        type=float,
        default=0.1,
        metavar="P",
        help="how close to come, as a share (%(default)s)",
    )
    search.add_argument(
        "--knee-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="how long the arrivals at each rate take at least: more requests are sent for it (%(default)s)",
    )
    actions = parser.add_subparsers(dest="action", metavar="report")
    report = actions.add_parser(
        "report",
        help="a page of one run, or of several beside each other, from what --json wrote",
        epilog="example: pageturner loadtest report before.json after.json --out compared.html",
    )
    report.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    report.add_argument(
        "--out", type=Path, default=Path("report.html"), metavar="FILE.html", help="(%(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """0 if every request ended as the workload says or was shed, 1 if any failed, 2 if nothing could be run;
    128 and the signal's number if one ended the run early, with the figures of what had ended."""
    interruption = Interruption()
    try:
        if arguments.action == "report":
            return _compare(arguments)
        planned = make_run(arguments)
        objectives = Objectives.parse(arguments.goodput)
        knee = _knee_options(arguments, planned, objectives)
        if arguments.report is not None:
            check_page(arguments.report)
        with interruption.watching():
            model = interruption.run(discover(planned.target, arguments.seed))
            if model is not None:
                planned = for_model(planned, model)
                console = Console(stderr=True)
                if knee is None:
                    finished = measure(planned, model, objectives, interruption, console)
                else:
                    finished = search(planned, model, objectives, interruption, console, knee)
                _report(finished, as_json=arguments.json)
                if arguments.report is not None:
                    write_page([NamedRun(arguments.report.stem, to_document(finished))], arguments.report)
    except LoadtestError as error:
        sys.stderr.write(f"pageturner loadtest: {error}\n")
        return EXIT_USER_ERROR
    if interruption.number is not None:
        if model is None:
            sys.stderr.write("pageturner loadtest: ended before the first request was sent\n")
        return 128 + interruption.number
    return EXIT_SOME_FAILED if finished.summary.num_failed or finished.summary.num_cancelled else 0


def _knee_options(arguments: argparse.Namespace, planned: Run, objectives: Objectives) -> KneeOptions | None:
    """None where no knee is asked for. Raises OptionError."""
    if not arguments.find_knee:
        return None
    if not objectives.limits:
        raise OptionError("find-knee", "needs --goodput")
    arrivals = planned.workload.arrivals
    assert isinstance(arrivals, RandomArrivals), "make_run gave them"
    return KneeOptions(arrivals.rate, arguments.knee_share, arguments.knee_precision, arguments.knee_seconds)


def _compare(arguments: argparse.Namespace) -> int:
    """`report`: a page of runs that were kept as JSON."""
    check_page(arguments.out)
    write_page(read_runs(arguments.files), arguments.out)
    sys.stdout.write(f"{arguments.out}\n")
    return 0


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
