"""From a run to figures, and from the figures of several seeds to intervals. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pageturner.service.simulator.outcomes import SimulatedRequest
from pageturner.service.simulator.simulation import SimulationResult

Figures = Mapping[str, float]
"""By the name of a METRIC. One that has no value in a run (a latency of no request) is left out."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a run. more_is_better: None where neither is."""

    name: str
    title: str
    unit: str
    more_is_better: bool | None = False


_LATENCIES = (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2e", "end to end"))
SHARES = (0.5, 0.9, 0.99)

METRICS: tuple[Metric, ...] = (
    Metric("throughput", "output", "tokens/s", True),
    Metric("total_throughput", "prompt and output", "tokens/s", True),
    Metric("goodput", "goodput", "requests/s", True),
    *(
        Metric(f"{name}_p{share * 100:.0f}", f"{title} p{share * 100:.0f}", "s")
        for name, title in _LATENCIES
        for share in SHARES
    ),
    *(Metric(f"{name}_mean", f"{title} mean", "s") for name, title in _LATENCIES),
    Metric("ttft_max", "TTFT max", "s"),
    Metric("itl_max", "ITL max", "s"),
    Metric("urgent_ttft_mean", "TTFT mean of the most urgent", "s"),
    Metric("slowdown_mean", "seconds a token of work", "s"),
    Metric("preemptions", "preemptions", ""),
    Metric("swap_preemptions", "by swap", "", None),
    Metric("recompute_preemptions", "by recompute", "", None),
    Metric("tail_preemptions", "by tail", "", None),
    Metric("recompute_tax", "recompute tax", "share"),
    Metric("recomputed_tokens", "recomputed tokens", ""),
    Metric("prefix_hit_share", "prefix hits", "share", True),
    Metric("handed_share", "handed over", "of prompt tokens", None),
    Metric("failed_handovers", "hand-overs failed", ""),
    Metric("draft_share", "drafts", "of output tokens", None),
    Metric("accepted_share", "drafts that came true", "of output tokens", True),
    Metric("kv_occupancy", "KV occupancy", "share", None),
    Metric("kv_waste", "KV waste", "share"),
    Metric("imbalance", "busiest server", "x mean"),
    Metric("fairness_gap", "fairness gap", "tokens"),
    Metric("deadline_misses", "deadlines missed", ""),
    Metric("failed", "failed or refused", ""),
    Metric("seconds", "makespan", "s"),
)
METRIC: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must meet to count for goodput: seconds to its first, and a token after that."""

    ttft_seconds: float = 2.0
    tpot_seconds: float = 0.1


DEFAULT_SLO = Slo()


def figures_of(result: SimulationResult, slo: Slo = DEFAULT_SLO) -> Figures:
    """Latencies are those of requests that ended well, from their arrival."""
    well = [request for request in result.requests if request.error is None]
    seconds = max(result.seconds, 1e-12)
    stats, num_outputs = result.stats, sum(request.num_output_tokens for request in result.requests)
    found: dict[str, float] = {
        "throughput": sum(request.num_output_tokens for request in well) / seconds,
        "total_throughput": sum(r.num_output_tokens + r.num_prompt_tokens for r in well) / seconds,
        "goodput": sum(_meets(request, slo) for request in well) / seconds,
        "preemptions": float(
            stats.num_swap_preemptions_total
            + stats.num_recompute_preemptions_total
            + stats.num_tail_preemptions_total
        ),
        "swap_preemptions": float(stats.num_swap_preemptions_total),
        "recompute_preemptions": float(stats.num_recompute_preemptions_total),
        "tail_preemptions": float(stats.num_tail_preemptions_total),
        "recompute_tax": result.num_recomputed_tokens / max(1, result.num_scheduled_tokens),
        "recomputed_tokens": float(result.num_recomputed_tokens),
        "prefix_hit_share": stats.num_prefix_hit_tokens_total / max(1, stats.num_prefix_query_tokens_total),
        "draft_share": stats.num_drafted_tokens_total / max(1, num_outputs),
        "accepted_share": stats.num_accepted_drafts_total / max(1, num_outputs),
        "fairness_gap": result.fairness_gap,
        "deadline_misses": float(sum(type(r.error).__name__ == "DeadlineExceeded" for r in result.requests)),
        "failed": float(len(result.requests) - len(well)),
        "seconds": result.seconds,
        "kv_occupancy": _mean_over_time(result, "used_share"),
        "kv_waste": _mean_over_time(result, "wasted_share"),
    }
    samples = {
        "ttft": [ttft for request in well if (ttft := _ttft(request)) is not None],
        "tpot": [tpot for request in well if (tpot := _tpot(request)) is not None],
        "itl": [b - a for r in well for a, b in zip(r.token_times, r.token_times[1:], strict=False)],
        "e2e": [_end_to_end(request) for request in well],
    }
    for name, values in samples.items():
        if values:
            ordered = sorted(values)
            found[f"{name}_mean"] = math.fsum(ordered) / len(ordered)
            for share in SHARES:
                found[f"{name}_p{share * 100:.0f}"] = percentile(ordered, share)
    if samples["itl"]:
        found["itl_max"] = max(samples["itl"])
    urgent = max((request.priority for request in result.requests), default=0)
    urgent_ttfts = [ttft for r in well if r.priority == urgent and (ttft := _ttft(r)) is not None]
    if urgent_ttfts:
        found["urgent_ttft_mean"] = math.fsum(urgent_ttfts) / len(urgent_ttfts)
    if samples["ttft"]:
        found["ttft_max"] = max(samples["ttft"])
        slowdowns = [_end_to_end(r) / (r.num_output_tokens + r.num_prompt_tokens / 32) for r in well]
        found["slowdown_mean"] = math.fsum(slowdowns) / len(slowdowns)
    return {metric.name: found[metric.name] for metric in METRICS if metric.name in found}


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the sorted samples lie, linear between two neighbours."""
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and its 95 % confidence interval (Student's t); a point for one seed."""

    mean: float
    low: float
    high: float
    num_seeds: int

    @property
    def half_width(self) -> float | None:
        """None for one seed, which tells nothing of chance."""
        return (self.high - self.low) / 2 if self.num_seeds > 1 else None

    @property
    def excludes_zero(self) -> bool:
        """So that a difference is told from chance; never for one seed."""
        return self.num_seeds > 1 and (self.low > 0 or self.high < 0)


def interval(values: Sequence[float]) -> Interval:
    """`values` must not be empty."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, mean, mean, 1)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = _t_975(count - 1) * deviation / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count)


# The 97.5 % quantile of Student's t for 1 to 30 degrees of freedom.
_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def _t_975(degrees: int) -> float:
    """Above the table, 1.96 and the first term of its expansion in 1 / degrees."""
    return _T_975[degrees - 1] if degrees <= len(_T_975) else 1.96 + 2.37 / degrees


def _ttft(request: SimulatedRequest) -> float | None:
    return request.token_times[0] - request.arrived_at if request.token_times else None


def _tpot(request: SimulatedRequest) -> float | None:
    times = request.token_times
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def _end_to_end(request: SimulatedRequest) -> float:
    assert request.ended_at is not None, "a finished run has no open request"
    return request.ended_at - request.arrived_at


def _meets(request: SimulatedRequest, slo: Slo) -> bool:
    ttft, tpot = _ttft(request), _tpot(request)
    return ttft is not None and ttft <= slo.ttft_seconds and (tpot is None or tpot <= slo.tpot_seconds)


def _mean_over_time(result: SimulationResult, name: str) -> float:
    """Each sample holds until the next; the first since the start."""
    total = last = 0.0
    for sample in result.samples:
        total += float(getattr(sample, name)) * (sample.at - last)
        last = sample.at
    return total / last if last else 0.0
