"""The figures of a run: as tables for people, as JSON for programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Group
from rich.table import Table

from pageturner.loadtest.runner import Run
from pageturner.loadtest.server import ServedModel
from pageturner.loadtest.statistics import RunSummary, Summary


def render(run: Run, model: ServedModel, summary: RunSummary) -> Group:
    """What was sent to whom, what came of it, and how long it took."""
    return Group(_counts(run, model, summary), _latencies(summary), *_errors(summary))


def to_json(run: Run, model: ServedModel, summary: RunSummary) -> dict[str, Any]:
    """Everything that the tables show, exact and in seconds, with the settings that made it."""
    workload = run.workload
    served = dataclasses.asdict(model)
    del served["token_ids"]
    return {
        "settings": {
            "address": run.target.address,
            "loop": "open" if run.is_open else "closed",
            "rate": workload.rate,
            "concurrency": None if run.is_open else run.concurrency,
            "num_processes": run.num_processes,
            "num_requests": workload.num_requests,
            "warmup": run.warmup,
            "prompt_tokens": str(workload.prompt_lengths),
            "output_tokens": str(workload.output_lengths),
            "shared_prefix_tokens": workload.shared_prefix_tokens,
            "priorities": str(workload.priorities),
            "tenants": str(workload.tenants),
            "seed": workload.seed,
            "timeout_seconds": run.target.timeout_seconds,
        },
        "server": served,
        "results": {
            "is_complete": summary.is_complete,
            **dataclasses.asdict(dataclasses.replace(summary, errors=(), policies=())),
            "policies": dict(summary.policies),
            "errors": dict(summary.errors),
            "requests_per_second": summary.requests_per_second,
            "output_tokens_per_second": summary.output_tokens_per_second,
            "total_tokens_per_second": summary.total_tokens_per_second,
            "tokens_per_message": summary.tokens_per_message,
        },
    }


def _counts(run: Run, model: ServedModel, summary: RunSummary) -> Table:
    workload = run.workload
    title = f"{model.name} ({model.dtype}, {model.kernels}) at {run.target.address}"
    if not summary.is_complete:
        title += (
            f"\nINCOMPLETE: ended early, after {summary.num_requests:,} of {summary.num_planned:,} requests"
        )
    loop = f"open, {workload.rate:g} requests/s" if workload.rate else f"closed, {run.concurrency} at once"
    failures = (summary.num_shed, summary.num_cancelled, summary.num_failed)
    preemptions = (summary.num_swaps, summary.num_recomputes, summary.num_tail_reclaims)
    cached, prompt = summary.num_cached_prompt_tokens, summary.num_prompt_tokens
    rows = {
        "loop": loop,
        "prompt / output tokens": f"{workload.prompt_lengths} / {workload.output_lengths}",
        "requests ok": f"{summary.num_ok:,} of {summary.num_requests:,}",
        "shed / cancelled / failed": " / ".join(f"{count:,}" for count in failures),
        "duration": f"{summary.duration_seconds:.2f} s",
        "requests/s": f"{summary.requests_per_second:.2f}",
        "output tokens/s": f"{summary.output_tokens_per_second:,.1f}",
        "total tokens/s": f"{summary.total_tokens_per_second:,.1f}",
        "prompt tokens cached": f"{cached:,} of {prompt:,}",
        "tokens a message": f"{summary.tokens_per_message:.2f}",
        "preemptions: swap / recompute / tail": " / ".join(f"{count:,}" for count in preemptions),
    }
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(name, value)
    for axis, policy in summary.policies:
        table.add_row(f"{axis} policy", policy)
    return table


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
