"""`pageturner loadtest`: put load on a running server and say honestly how it bore it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pageturner.loadtest.address import check_address
from pageturner.loadtest.client import RequestRecord
from pageturner.loadtest.errors import LoadtestError, OptionError, OutputLost
from pageturner.loadtest.interruption import Interruption
from pageturner.loadtest.report import render, to_json
from pageturner.loadtest.runner import Run, execute
from pageturner.loadtest.server import ServedModel, Target, discover
from pageturner.loadtest.statistics import RunSummary, summarize_run
from pageturner.loadtest.workload import Lengths, LoadtestWorkload, Mix

HELP = "put load on a running server and report latency and throughput"
EXAMPLE = "pageturner loadtest --concurrency 16 --requests 128 --prompt-tokens 128 --output-tokens 128"
EXIT_SOME_FAILED = 1
EXIT_USER_ERROR = 2
MAX_TIMEOUT_SECONDS = 1e8
"""Three years; gRPC's own count of time overflows not far above."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every flag, with its default in the help."""
    add = parser.add_argument
    add(
        "--target",
        "--address",
        dest="address",
        default="127.0.0.1:50051",
        metavar="HOST:PORT|unix:PATH",
        help="the server (%(default)s)",
    )
    add("--model", default="", help="its name; the one that the server runs if left out")
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument(
        "--concurrency", type=int, default=16, help="closed loop: requests at once (%(default)s)"
    )
    loop.add_argument(
        "--rate", type=float, help="open loop: arrivals a second on average, as a Poisson process"
    )
    add("--requests", type=int, default=128, help="how many to send (%(default)s)")
    add("--warmup", type=int, default=4, help="requests sent before, not counted (%(default)s)")
    add("--processes", type=int, default=1, help="client processes; more if send lag shows (%(default)s)")
    add("--prompt-tokens", default="128", metavar="N|LOW-HIGH", help="length of prompts (%(default)s)")
    add("--output-tokens", default="128", metavar="N|LOW-HIGH", help="length of outputs (%(default)s)")
    add(
        "--shared-prefix-tokens", type=int, default=0, help="tokens that all prompts begin with (%(default)s)"
    )
    add("--priorities", default="0", metavar="P:WEIGHT,...", help="mix of priorities, such as 0:9,5:1")
    add("--tenants", default="", metavar="NAME:WEIGHT,...", help="mix of tenants, such as alice:3,bob:1")
    add("--seed", type=int, default=0, help="of prompts, lengths and arrivals (%(default)s)")
    add("--timeout", type=float, default=600.0, help="seconds for one request (%(default)s)")
    add("--json", action="store_true", help="figures as JSON on standard output, tables on standard error")


def run(arguments: argparse.Namespace) -> int:
    """0 if every request ended well or was shed, 1 if any failed, 2 if nothing could be run; 128 and the
    signal's number if one ended the run early, with the figures of what had ended."""
    interruption = Interruption()
    try:
        planned = make_run(arguments)
        with interruption.watching():
            model = interruption.run(discover(planned.target, arguments.seed))
            if model is not None:
                planned = for_model(planned, model)
                records = _execute_with_progress(planned, interruption)
                summary = summarize_run(records, planned.workload.num_requests)
                _report(planned, model, summary, as_json=arguments.json)
    except LoadtestError as error:
        sys.stderr.write(f"pageturner loadtest: {error}\n")
        return EXIT_USER_ERROR
    if interruption.number is not None:
        if model is None:
            sys.stderr.write("pageturner loadtest: ended before the first request was sent\n")
        return 128 + interruption.number
    return EXIT_SOME_FAILED if summary.num_failed or summary.num_cancelled else 0


def make_run(arguments: argparse.Namespace) -> Run:
    """What the flags ask for, before any server is asked. Raises OptionError."""
    target = Target(
        check_address("target", arguments.address),
        arguments.model,
        _seconds("timeout", arguments.timeout),
    )
    workload = LoadtestWorkload(
        num_requests=arguments.requests,
        prompt_lengths=Lengths.parse("prompt-tokens", arguments.prompt_tokens),
        output_lengths=Lengths.parse("output-tokens", arguments.output_tokens),
        seed=arguments.seed,
        shared_prefix_tokens=arguments.shared_prefix_tokens,
        rate=arguments.rate,
        priorities=Mix.parse_integers("priorities", arguments.priorities),
        tenants=Mix.parse("tenants", arguments.tenants),
    )
    return Run(target, workload, arguments.concurrency, arguments.processes, arguments.warmup)


def for_model(planned: Run, model: ServedModel) -> Run:
    """The same with prompts of the model's tokens. Raises OptionError where it is too short for them."""
    workload = planned.workload
    longest = workload.prompt_lengths.high + workload.output_lengths.high
    if longest > model.max_model_len:
        raise OptionError(
            "output-tokens",
            f"prompt and output may reach {longest} tokens, {model.name} has {model.max_model_len}",
        )
    return replace(planned, workload=replace(workload, token_ids=model.token_ids))


def _execute_with_progress(planned: Run, interruption: Interruption) -> list[RequestRecord]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=planned.workload.num_requests)
        return execute(planned, lambda _: progress.advance(task), interruption)


def _report(planned: Run, model: ServedModel, summary: RunSummary, *, as_json: bool) -> None:
    table = render(planned, model, summary)
    if as_json:
        Console(stderr=True).print(table)
    try:
        if not as_json:
            Console().print(table)
        else:
            sys.stdout.write(json.dumps(to_json(planned, model, summary), indent=2) + "\n")
            sys.stdout.flush()
    except BrokenPipeError:
        raise  # the reader has seen enough, as `head` does: no error
    except OSError as error:
        # Python would complain once more while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputLost(f"standard output: {error.strerror}") from error


def _seconds(option: str, value: float) -> float:
    """A time limit that gRPC can count."""
    if not 0 < value <= MAX_TIMEOUT_SECONDS:
        raise OptionError(option, f"must be above 0 and at most {MAX_TIMEOUT_SECONDS:g} seconds, not {value}")
    return value
