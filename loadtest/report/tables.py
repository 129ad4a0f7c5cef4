"""The figures of a run as tables in a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pageturner.loadtest.knee import said_rate
from pageturner.loadtest.meter import warning
from pageturner.loadtest.report.document import FinishedRun
from pageturner.loadtest.statistics import RunSummary, Summary


def render(finished: FinishedRun) -> Group:
    """What was sent to whom, what came of it, and how long it took."""
    return Group(
        _counts(finished),
        _latencies(finished.summary),
        *_errors(finished.summary),
        *_probes(finished),
        *_warnings(finished),
    )


def _counts(finished: FinishedRun) -> Table:
    run, model, summary = finished.run, finished.model, finished.summary
    computes = ", ".join(filter(None, (model.dtype, model.kernels)))  # kernels: where AdminService tells
    title = f"{model.name} ({computes}) at {run.target.address}"
    if not summary.is_complete:
        title += (
            f"\nINCOMPLETE: ended early, after {summary.num_requests:,} of {summary.num_planned:,} requests"
        )
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in _rows(finished).items():
        table.add_row(name, value)
    for axis, policy in summary.policies:
        table.add_row(f"{axis} policy", policy)
    return table


def _rows(finished: FinishedRun) -> dict[str, str]:
    run, summary = finished.run, finished.summary
    workload = run.workload
    failures = (summary.num_shed, summary.num_cancelled, summary.num_failed)
    preemptions = (summary.num_swaps, summary.num_recomputes, summary.num_tail_reclaims)
    cached, prompt = summary.num_cached_prompt_tokens, summary.num_prompt_tokens
    lengths = "of the trace" if workload.trace else f"{workload.prompt_lengths} / {workload.output_lengths}"
    rows = {
        "loop": f"open, {workload.arrivals}" if run.is_open else f"closed, {run.concurrency} at once",
        "workload": workload.name,
        "prompt / output tokens": lengths,
        "requests ok": f"{summary.num_ok:,} of {summary.num_requests:,}",
        "shed / cancelled / failed": " / ".join(f"{count:,}" for count in failures),
    }
    if summary.num_abandoned or summary.num_slow_readers:
        rows["abandoned by the client / read slowly"] = (
            f"{summary.num_abandoned:,} / {summary.num_slow_readers:,}"
        )
    if str(finished.cuts) != "nothing":
        rows["cut to the model's context"] = str(finished.cuts)
    rows |= {
        "duration": f"{summary.duration_seconds:.2f} s",
        "requests/s": f"{summary.requests_per_second:.2f}",
        "output tokens/s": f"{summary.output_tokens_per_second:,.1f}",
        "total tokens/s": f"{summary.total_tokens_per_second:,.1f}",
        "prompt tokens cached": f"{cached:,} of {prompt:,}",
        "tokens a message": f"{summary.tokens_per_message:.2f}",
        "preemptions: swap / recompute / tail": " / ".join(f"{count:,}" for count in preemptions),
    }
    goodput = summary.goodput
    if goodput.objectives.limits:
        rows[f"goodput ({goodput.objectives})"] = (
            f"{summary.good_requests_per_second:.2f} requests/s, {goodput.share:.1%}"
        )
    if finished.samples and (last := finished.samples[-1]).resident_bytes:
        first = finished.samples[0]
        rows["server: resident memory, before and after"] = (
            f"{first.resident_bytes / 2**20:,.0f} MiB, {last.resident_bytes / 2**20:,.0f} MiB"
        )
        rows["server: processor seconds"] = f"{last.cpu_seconds - first.cpu_seconds:,.1f}"
    if finished.costs:
        shares = " + ".join(f"{cost.cpu_share:.0%}" for cost in finished.costs)
        lag = max(cost.loop_lag_p99 for cost in finished.costs)
        rows["client: share of a core, loop lag p99"] = f"{shares}, {1e3 * lag:.1f} ms"
    return rows


def _latencies(summary: RunSummary) -> Table:
    table = Table("milliseconds", title="latency from the scheduled send time")
    for column in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="right")
    rows: tuple[tuple[str, Summary | None], ...] = (
        ("TTFT", summary.time_to_first_token),
        ("TPOT", summary.time_per_output_token),
        ("ITL", summary.inter_token_latency),
        ("end to end", summary.end_to_end),
        ("queued (server)", summary.queue_seconds),
        ("send lag", summary.send_lag),
    )
    for name, figures in rows:
        if figures is None:
            table.add_row(name, *["-"] * 5)
            continue
        seconds = (figures.mean, figures.p50, figures.p90, figures.p99, figures.max)
        table.add_row(name, *(f"{1e3 * value:,.1f}" for value in seconds))
    return table


def _errors(summary: RunSummary) -> list[Table]:
    if not summary.errors:
        return []
    table = Table("times", "error")
    for error, count in summary.errors:
        table.add_row(str(count), error)
    return [table]


def _probes(finished: FinishedRun) -> list[RenderableType]:
    """Of a search for the knee."""
    knee = finished.knee
    if knee is None:
        return []
    found = "none holds" if knee.rate is None else f"{said_rate(knee.rate)} holds"
    title = f"{found} for {knee.options.share:.0%} of requests ({finished.summary.goodput.objectives})"
    table = Table("rate", "good", "of", "share", "95 % interval", "", title=title)
    for probe in sorted(knee.probes, key=lambda probe: probe.rate):
        table.add_row(
            said_rate(probe.rate),
            f"{probe.num_good:,}",
            f"{probe.num_judged:,}",
            f"{probe.share:.1%}",
            f"{probe.low:.1%} to {probe.high:.1%}",
            ("holds" if probe.holds else "does not") + (", close" if probe.is_close else ""),
        )
    return [table]


def _warnings(finished: FinishedRun) -> list[RenderableType]:
    said = warning(finished.costs)
    return [Text(f"WARNING: {said}", style="yellow")] if said else []
