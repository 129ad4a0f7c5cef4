"""What two readings say together: rates, and latencies of the time between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pageturner.service.engine.api import Latencies
from pageturner.service.top.readings import Reading

WINDOW_SECONDS = 10.0
"""Rates and latencies are of the last so many seconds."""

NUM_KEPT = 120
"""Rates of output that are kept for a line of their course."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """In seconds; None where nothing was observed."""

    median: float | None = None
    p95: float | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the last seconds; rates are None before a second reading. course: output tokens/s, by reading."""

    output_tokens_per_second: float | None = None
    prompt_tokens_per_second: float | None = None
    requests_per_second: float | None = None
    refusals_per_second: float | None = None
    preemptions_per_second: float | None = None
    prefix_hit_share: float | None = None
    accepted_draft_share: float | None = None
    time_to_first_token: Quantiles = Quantiles()
    inter_token_latency: Quantiles = Quantiles()
    course: tuple[float, ...] = ()


class History:
    """The readings of the last seconds, of one life of the server: a restart begins anew."""

    def __init__(self, window_seconds: float = WINDOW_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._readings: deque[Reading] = deque()
        self._course: deque[float] = deque(maxlen=NUM_KEPT)

    def add(self, reading: Reading) -> Figures:
        """What it says beside those before."""
        if self._readings and _is_another_life(self._readings[-1], reading):
            self._readings.clear()
        if self._readings:
            rate = _rate(self._readings[-1], reading, lambda r: r.activity.num_generation_tokens_total)
            if rate is not None:
                self._course.append(rate)
        self._readings.append(reading)
        # One that is older than the window is kept, so that there is a whole window to look back on.
        while len(self._readings) > 2 and reading.at - self._readings[1].at >= self._window_seconds:
            self._readings.popleft()
        return _figures(self._readings[0], reading, tuple(self._course))


def _is_another_life(before: Reading, now: Reading) -> bool:
    return now.activity.uptime_seconds < before.activity.uptime_seconds


def _rate(before: Reading, now: Reading, value: Callable[[Reading], float]) -> float | None:
    """A second, by the server's own clock: a view that was held up does not see a burst."""
    seconds = now.activity.uptime_seconds - before.activity.uptime_seconds
    return (value(now) - value(before)) / seconds if seconds > 0 else None


def _figures(before: Reading, now: Reading, course: tuple[float, ...]) -> Figures:
    queried = now.load.num_prefix_query_tokens_total - before.load.num_prefix_query_tokens_total
    hit = now.load.num_prefix_hit_tokens_total - before.load.num_prefix_hit_tokens_total
    drafted = now.load.num_drafted_tokens_total - before.load.num_drafted_tokens_total
    accepted = now.load.num_accepted_drafts_total - before.load.num_accepted_drafts_total
    return Figures(
        output_tokens_per_second=_rate(before, now, lambda r: r.activity.num_generation_tokens_total),
        prompt_tokens_per_second=_rate(before, now, lambda r: r.activity.num_prompt_tokens_total),
        requests_per_second=_rate(before, now, lambda r: sum(r.activity.finished_total.values())),
        refusals_per_second=_rate(before, now, lambda r: r.activity.num_refused_total),
        preemptions_per_second=_rate(before, now, _num_preemptions),
        prefix_hit_share=hit / queried if queried > 0 else None,
        accepted_draft_share=accepted / drafted if drafted > 0 else None,
        time_to_first_token=_quantiles(before.activity.time_to_first_token, now.activity.time_to_first_token),
        inter_token_latency=_quantiles(before.activity.inter_token_latency, now.activity.inter_token_latency),
        course=course,
    )


def _num_preemptions(reading: Reading) -> int:
    load = reading.load
    return (
        load.num_swap_preemptions_total
        + load.num_recompute_preemptions_total
        + load.num_tail_preemptions_total
    )


def _quantiles(before: Latencies, now: Latencies) -> Quantiles:
    """Of what was observed between the two; of all that was before, where nothing was."""
    if before.bounds != now.bounds:
        return Quantiles()
    between = [late - early for early, late in zip(before.cumulative, now.cumulative, strict=True)]
    cumulative = between if between[-1] else now.cumulative
    return Quantiles(quantile(now.bounds, cumulative, 0.5), quantile(now.bounds, cumulative, 0.95))


def quantile(bounds: Iterable[float], cumulative: Iterable[int], share: float) -> float | None:
    """As Prometheus' histogram_quantile: evenly spread within a bucket; None of nothing; the highest bound
    for what lies above it."""
    counts = list(cumulative)
    if not counts or not counts[-1]:
        return None
    rank, low, below = share * counts[-1], 0.0, 0
    for bound, count in zip(bounds, counts, strict=False):
        if count >= rank:
            return low + (bound - low) * (rank - below) / max(1, count - below)
        low, below = bound, count
    return low
