"""A run with everything that is watched meanwhile, and a search over many of them."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from pageturner.loadtest.goodput import Goodput, Objectives
from pageturner.loadtest.interruption import Interruption
from pageturner.loadtest.knee import KneeOptions, Probe, find_knee, said_rate
from pageturner.loadtest.live import live_display
from pageturner.loadtest.meter import ClientCost
from pageturner.loadtest.monitor import Monitor
from pageturner.loadtest.report.document import FinishedRun
from pageturner.loadtest.runner import Run, execute
from pageturner.loadtest.server import ServedModel
from pageturner.loadtest.statistics import summarize_run
from pageturner.loadtest.workload.arrivals import RandomArrivals
from pageturner.loadtest.workload.shapes import plan_shapes


def measure(
    run: Run,
    model: ServedModel,
    objectives: Objectives,
    interruption: Interruption,
    console: Console,
    title: str = "requests",
) -> FinishedRun:
    """Send it, watch the server, show how it goes. Raises LoadtestError."""
    shapes, cuts = plan_shapes(run.workload)
    num_requests = sum(len(shape.turns) for shape in shapes)
    costs: list[ClientCost] = []
    with live_display(title, num_requests, console) as display:
        target = run.target
        monitor = Monitor(target.admin_address or target.address, display.on_sample, access=target.access)
        with monitor.watching():
            records = execute(run, display.on_record, interruption, costs.append)
    summary = summarize_run(records, num_requests, objectives)
    return FinishedRun(run, model, records, summary, cuts, costs, monitor.samples)


def search(
    run: Run,
    model: ServedModel,
    objectives: Objectives,
    interruption: Interruption,
    console: Console,
    options: KneeOptions,
) -> FinishedRun:
    """The knee, and the last run at it; where no rate holds, the last run of all. Each batch has a seed of
    its own, so that none finds its prompts cached. Raises LoadtestError."""
    finished: dict[float, FinishedRun] = {}

    def send(rate: float, number: int) -> Goodput | None:
        arrivals = run.workload.arrivals
        assert isinstance(arrivals, RandomArrivals)
        workload = replace(
            run.workload,
            arrivals=replace(arrivals, rate=rate),
            num_requests=options.batch(rate, run.workload.num_requests),
            seed=run.workload.seed + number,
        )
        batch = replace(run, workload=workload, warmup=0 if number else run.warmup)
        found = measure(batch, model, objectives, interruption, console, said_rate(rate))
        finished[rate] = found
        return None if interruption.number is not None else found.summary.goodput

    def tell(probe: Probe) -> None:
        verdict = "holds" if probe.holds else "does not hold"
        close = ", close" if probe.is_close else ""
        console.print(
            f"{said_rate(probe.rate)} {verdict}: {probe.share:.1%} good of {probe.num_judged} "
            f"(95 % interval {probe.low:.1%} to {probe.high:.1%}{close})"
        )

    knee = find_knee(send, options, tell)
    shown = list(finished.values())[-1] if knee.rate is None else finished[knee.rate]
    return replace(shown, knee=knee)
