"""A run as one JSON document: all that its tables and its page show."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pageturner.loadtest.client import RequestRecord
from pageturner.loadtest.knee import Knee
from pageturner.loadtest.meter import ClientCost, warning
from pageturner.loadtest.monitor import LoadSample
from pageturner.loadtest.peers.machine import read_machine
from pageturner.loadtest.report.bench_serve import bench_serve_fields
from pageturner.loadtest.report.series import distributions, load_over_time, tokens_over_time
from pageturner.loadtest.runner import Run
from pageturner.loadtest.server import ServedModel
from pageturner.loadtest.statistics import RunSummary
from pageturner.loadtest.workload.shapes import Cuts


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """All that a finished run left.

    cuts: what the model's context made shorter. costs: of each client process; none of several that were
    ended early. samples: of the server, as far as it tells its load. knee: of a search for it.
    """

    run: Run
    model: ServedModel
    records: Sequence[RequestRecord]
    summary: RunSummary
    cuts: Cuts
    costs: Sequence[ClientCost] = ()
    samples: Sequence[LoadSample] = ()
    knee: Knee | None = None

    @property
    def start(self) -> float:
        """When the first request was due, on the client's clock."""
        return min((record.scheduled_at for record in self.records), default=0.0)


def to_document(finished: FinishedRun) -> dict[str, Any]:
    """Exact figures, in seconds where a name does not say milliseconds, with the settings that made them. The
    fields of `vllm bench serve` are at the top level."""
    served = dataclasses.asdict(finished.model)
    del served["token_ids"]
    served["config"] = dict(finished.model.config)
    summary = finished.summary
    goodput = summary.goodput
    return {
        "settings": _settings(finished.run),
        "server": served,
        "client": _client(finished.costs),
        "server_resident_bytes": {
            "first": finished.samples[0].resident_bytes,
            "last": finished.samples[-1].resident_bytes,
            "most": max(sample.resident_bytes for sample in finished.samples),
        }
        if finished.samples
        else None,
        "results": {
            "is_complete": summary.is_complete,
            **dataclasses.asdict(dataclasses.replace(summary, errors=(), policies=())),
            "policies": dict(summary.policies),
            "errors": dict(summary.errors),
            "requests_per_second": summary.requests_per_second,
            "output_tokens_per_second": summary.output_tokens_per_second,
            "total_tokens_per_second": summary.total_tokens_per_second,
            "tokens_per_message": summary.tokens_per_message,
            "cut_to_context": dataclasses.asdict(finished.cuts),
            "goodput": {
                "objectives": str(goodput.objectives),
                "num_good": goodput.num_good,
                "num_judged": goodput.num_judged,
                "share": goodput.share,
                "requests_per_second": summary.good_requests_per_second,
            },
        },
        "over_time": {
            "load": load_over_time(finished.samples, finished.start),
            "output": tokens_over_time(finished.records, finished.start),
        },
        "distributions": distributions(finished.records),
        "knee": None if finished.knee is None else finished.knee.to_plain(),
        **bench_serve_fields(finished.records, summary),
    }


def _settings(run: Run) -> dict[str, Any]:
    workload = run.workload
    return {
        "address": run.target.address,
        "loop": "open" if run.is_open else "closed",
        "arrivals": str(workload.arrivals) if run.is_open else None,
        "rate": getattr(workload.arrivals, "rate", None),
        "concurrency": None if run.is_open else run.concurrency,
        "num_processes": run.num_processes,
        "num_requests": workload.num_requests,
        "warmup": run.warmup,
        "workload": workload.name,
        "prompt_tokens": str(workload.prompt_lengths),
        "output_tokens": str(workload.output_lengths),
        "correlation": workload.correlation,
        "turns": str(workload.turns),
        "think_seconds": workload.think_seconds,
        "shared_prefix_tokens": workload.shared_prefix_tokens,
        "system_prompts": str(workload.system_prompts) if workload.system_prompts else None,
        "priorities": str(workload.priorities),
        "tenants": str(workload.tenants),
        "cancel_rate": workload.conduct.cancel_rate,
        "slow_reader_rate": workload.conduct.slow_rate,
        "slow_reader_seconds": workload.conduct.slow_seconds,
        "seed": workload.seed,
        "timeout_seconds": run.target.timeout_seconds,
    }


def _client(costs: Sequence[ClientCost]) -> dict[str, Any]:
    """Of the client itself and its machine; lags are those of the latest process."""
    machine = dataclasses.asdict(read_machine())
    if not costs:
        return {"machine": machine}
    return {
        "machine": machine,
        "cpu_seconds": sum(cost.cpu_seconds for cost in costs),
        "cpu_share": [cost.cpu_share for cost in costs],
        "warning": warning(costs),
        "loop_lag_p99": max(cost.loop_lag_p99 for cost in costs),
        "loop_lag_max": max(max(cost.loop_lags, default=0.0) for cost in costs),
    }
