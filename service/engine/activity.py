"""What was done since start, as clients ask for it, of the service's counters."""

from __future__ import annotations

from pageturner.service.engine.api import Activity, Condition, Latencies
from pageturner.service.engine.instruments import HistogramSnapshot
from pageturner.service.engine.metrics import MetricsSnapshot


def activity_of(condition: Condition, uptime_seconds: float, metrics: MetricsSnapshot) -> Activity:
    """metrics: of this moment."""
    counters, histograms = metrics.counters, metrics.histograms
    return Activity(
        health=condition.health,
        uptime_seconds=uptime_seconds,
        num_prompt_tokens_total=counters["prompt_tokens_total"],
        num_generation_tokens_total=counters["generation_tokens_total"],
        num_refused_total=sum(metrics.requests_refused_total.values()),
        finished_total=metrics.requests_finished_total,
        time_to_first_token=_latencies(histograms["time_to_first_token_seconds"]),
        inter_token_latency=_latencies(histograms["inter_token_latency_seconds"]),
        request_latency=_latencies(histograms["e2e_request_latency_seconds"]),
        queue_time=_latencies(histograms["request_queue_time_seconds"]),
        health_reason=condition.reason,
    )


def _latencies(histogram: HistogramSnapshot) -> Latencies:
    return Latencies(histogram.bounds, histogram.cumulative, histogram.sum)
