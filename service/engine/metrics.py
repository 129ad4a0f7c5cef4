"""Counters and latencies of the service, kept in memory under the names that dashboards know."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from pageturner.service.core.outputs import Event, FinishedEvent, SchedulerStats, TokenEvent
from pageturner.service.engine.api import AcceptedEvent
from pageturner.service.errors import RefusalCause

LATENCY_BOUNDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
"""Upper bounds in seconds; the last bucket is without bound."""


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Observations at or below each bound (cumulative, the last one is `count`), and their sum."""

    bounds: tuple[float, ...]
    cumulative: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """All observations."""
        return self.cumulative[-1]


class Histogram:
    """Counts by upper bound. O(log bounds) an observation."""

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value` so many times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def snapshot(self) -> HistogramSnapshot:
        """A frozen copy."""
        return HistogramSnapshot(self._bounds, tuple(accumulate(self._counts)), self._sum)


NO_STATS = SchedulerStats()
"""While the model loads, and no scheduler is there."""


class Method(NamedTuple):
    """A gRPC method, by the labels that Prometheus' gRPC dashboards know."""

    grpc_type: str
    grpc_service: str
    grpc_method: str


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """Values by metric name. requests_finished_total: by outcome, `ok` or the kind of error.

    grpc_server_handled_total: by method and status code. callers_refused_total: by cause.
    """

    counters: Mapping[str, int]
    gauges: Mapping[str, float]
    histograms: Mapping[str, HistogramSnapshot]
    requests_finished_total: Mapping[str, int]
    grpc_server_started_total: Mapping[Method, int]
    grpc_server_handled_total: Mapping[tuple[Method, str], int]
    callers_refused_total: Mapping[str, int]


@dataclass(slots=True)
class _Timeline:
    """When a request arrived, and when each choice last got a token."""

    arrival_time: float
    last_token_time: dict[int, float] = field(default_factory=dict)


class Metrics:
    """All counters and latencies of one service; the figures of the scheduler's state are its own.

    Each value has one writer: the engine thread, or for stalls and calls the event loop. `snapshot` may be
    called from any thread.

    time_to_first_token_seconds: arrival to the first token of any choice, as it leaves the step.
    inter_token_latency_seconds: between tokens of one choice; a step that yields several counts each.
    """

    def __init__(self) -> None:
        self._time_to_first_token = Histogram()
        self._inter_token_latency = Histogram()
        self._request_latency = Histogram()
        self._queue_time = Histogram()
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_refused = 0
        self._num_stalls = 0
        self._num_given_up = 0
        self._outcomes: dict[str, int] = {}
        self._timelines: dict[str, _Timeline] = {}
        self._calls_started: Counter[Method] = Counter()
        self._calls_handled: Counter[tuple[Method, str]] = Counter()
        self._callers_refused: Counter[str] = Counter()

    # Calls of gRPC

    def call_started(self, method: Method) -> None:
        """A call has come in."""
        self._calls_started[method] += 1

    def call_handled(self, method: Method, code: str) -> None:
        """code: the name of the status that the call ended with."""
        self._calls_handled[method, code] += 1

    def caller_refused(self, cause: RefusalCause) -> None:
        """A call ended since its caller was not known, or not allowed to make it."""
        self._callers_refused[cause.value] += 1

    # The engine's requests

    def accepted(self, event: AcceptedEvent, arrival_time: float) -> None:
        """A request was accepted. arrival_time: on the engine's clock."""
        self._timelines[event.request_id] = _Timeline(arrival_time)
        self._num_prompt_tokens += event.num_prompt_tokens

    def refused(self) -> None:
        """A request was refused before it was accepted."""
        self._num_refused += 1

    def stalled(self) -> None:
        """A step took longer than `stall_seconds`."""
        self._num_stalls += 1

    def gave_up(self) -> None:
        """A request was given up, since nothing could be scheduled."""
        self._num_given_up += 1

    def observe(self, events: Iterable[Event], now: float) -> None:
        """Events of one step, as they leave it at `now`."""
        for event in events:
            if isinstance(event, TokenEvent):
                self._observe_tokens(event, now)
            elif isinstance(event, FinishedEvent):
                self._observe_finish(event, now)

    def snapshot(self, stats: SchedulerStats = NO_STATS) -> MetricsSnapshot:
        """All of it at one moment. stats: the figures of the scheduler then, if there is one yet."""
        held = stats.num_blocks_used
        return MetricsSnapshot(
            counters={
                "prompt_tokens_total": self._num_prompt_tokens,
                "generation_tokens_total": self._num_generation_tokens,
                "requests_refused_total": self._num_refused,
                "requests_given_up_total": self._num_given_up,
                "engine_stalls_total": self._num_stalls,
                "num_preemptions_total": stats.num_swap_preemptions_total
                + stats.num_recompute_preemptions_total
                + stats.num_tail_preemptions_total,
                "prefix_cache_queries_total": stats.num_prefix_query_tokens_total,
                "prefix_cache_hits_total": stats.num_prefix_hit_tokens_total,
            },
            gauges={
                "num_requests_running": stats.num_running,
                "num_requests_waiting": stats.num_waiting,
                "num_requests_swapped": stats.num_swapped,
                "kv_cache_usage_perc": held / stats.num_blocks if stats.num_blocks else 0.0,
            },
            histograms={
                "time_to_first_token_seconds": self._time_to_first_token.snapshot(),
                "inter_token_latency_seconds": self._inter_token_latency.snapshot(),
                "e2e_request_latency_seconds": self._request_latency.snapshot(),
                "request_queue_time_seconds": self._queue_time.snapshot(),
            },
            requests_finished_total=dict(self._outcomes),
            grpc_server_started_total=dict(self._calls_started),
            grpc_server_handled_total=dict(self._calls_handled),
            callers_refused_total=dict(self._callers_refused),
        )

    def _observe_tokens(self, event: TokenEvent, now: float) -> None:
        num_tokens = len(event.tokens)
        timeline = self._timelines.get(event.request_id)
        if not num_tokens or timeline is None:
            return
        self._num_generation_tokens += num_tokens
        last = timeline.last_token_time.get(event.index)
        if last is not None:
            self._inter_token_latency.observe((now - last) / num_tokens, num_tokens)
        elif not timeline.last_token_time:
            self._time_to_first_token.observe(now - timeline.arrival_time)
        timeline.last_token_time[event.index] = now

    def _observe_finish(self, event: FinishedEvent, now: float) -> None:
        outcome = "ok" if event.error is None else _snake_case(type(event.error).__name__)
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1
        self._queue_time.observe(event.timings.queue_seconds)
        timeline = self._timelines.pop(event.request_id, None)
        if timeline is not None:
            self._request_latency.observe(now - timeline.arrival_time)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
