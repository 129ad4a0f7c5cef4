"""Counters and latencies of the service, kept in memory under the names that dashboards know.

The one owner of what is counted; `service/monitoring` shows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    Event,
    FinishedEvent,
    SchedulerStats,
    ScoredTokensEvent,
    TokenEvent,
)
from pageturner.service.engine.api import AcceptedEvent, RecentLoad
from pageturner.service.engine.instruments import BoundedLabel, Histogram, HistogramSnapshot, RecentRate
from pageturner.service.errors import (
    DeadlineExceeded,
    NonFiniteLogits,
    PageturnerError,
    QueueFull,
    RefusalCause,
    StepFailed,
    TextFailed,
)

# The bounds of vLLM's histograms, so that panels made for them show as much here. A small model's tokens
# come faster than any that those were made for: three more bounds below.
FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
LENGTH_BOUNDS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
CALL_BOUNDS = (*(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0), *(30.0, 60.0, 300.0))
"""Prometheus' own, and three more: a stream lasts longer than other calls."""

DEFAULT_MAX_TENANTS = 64

NO_STATS = SchedulerStats()
"""While the model loads, and no scheduler is there."""

_SHED_BY = (DeadlineExceeded, QueueFull)
_FAULTS = (NonFiniteLogits, StepFailed, TextFailed)


class Method(NamedTuple):
    """A gRPC method, by the labels that Prometheus' gRPC dashboards know."""

    grpc_type: str
    grpc_service: str
    grpc_method: str


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """Values by metric name, or by name and label.

    requests_finished_total: by outcome, `ok` or the kind of error. requests_refused_total: by the kind of
    error that a request met before it was accepted. requests_shed_total: by the kind of error that ended an
    accepted request before its first token, for want of time or room. request_success_total: choices that
    ended well, by how. tenant_requests_total: by tenant and outcome. grpc_server_handled_total: by method and
    status code. callers_refused_total: by cause. files_refused_total: by what they hold.
    """

    counters: Mapping[str, int]
    gauges: Mapping[str, float]
    histograms: Mapping[str, HistogramSnapshot]
    requests_finished_total: Mapping[str, int]
    requests_refused_total: Mapping[str, int]
    requests_shed_total: Mapping[str, int]
    request_success_total: Mapping[str, int]
    tenant_requests_total: Mapping[tuple[str, str], int]
    tenant_prompt_tokens_total: Mapping[str, int]
    tenant_generation_tokens_total: Mapping[str, int]
    grpc_server_started_total: Mapping[Method, int]
    grpc_server_handled_total: Mapping[tuple[Method, str], int]
    callers_refused_total: Mapping[str, int]
    files_refused_total: Mapping[str, int]
    grpc_server_handling_seconds: Mapping[Method, HistogramSnapshot]


@dataclass(slots=True)
class _Timeline:
    """When a request arrived, for whom, and when each choice last got a token."""

    arrival_time: float
    tenant: str
    last_token_time: dict[int, float] = field(default_factory=dict)


class Metrics:
    """All counters and latencies of one service; the figures of the scheduler's state are its own.

    Each value has one writer: the engine thread, or for refusals, stalls and calls the event loop. `snapshot`
    and `recent` may be called from any thread. max_tenants: so many tenants are told apart, the rest are one.

    time_to_first_token_seconds: arrival to the first token of any choice, as it leaves the step.
    inter_token_latency_seconds: between tokens of one choice; a step that yields several counts each.
    """

    def __init__(self, max_tenants: int = DEFAULT_MAX_TENANTS) -> None:
        self._time_to_first_token = Histogram(FIRST_TOKEN_BOUNDS)
        self._inter_token_latency = Histogram(TOKEN_BOUNDS)
        self._request_latency = Histogram(REQUEST_BOUNDS)
        self._queue_time = Histogram(REQUEST_BOUNDS)
        self._prefill_time = Histogram(REQUEST_BOUNDS)
        self._decode_time = Histogram(REQUEST_BOUNDS)
        self._prompt_lengths = Histogram(LENGTH_BOUNDS)
        self._output_lengths = Histogram(LENGTH_BOUNDS)
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_scored_tokens = 0
        self._num_stalls = 0
        self._num_given_up = 0
        self._num_resumed = 0
        self._outcomes: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._sheds: Counter[str] = Counter()
        self._successes: Counter[str] = Counter()
        self._tenants = BoundedLabel(max_tenants)
        self._tenant_outcomes: Counter[tuple[str, str]] = Counter()
        self._tenant_prompt_tokens: Counter[str] = Counter()
        self._tenant_output_tokens: Counter[str] = Counter()
        self._timelines: dict[str, _Timeline] = {}
        self._recent_tokens, self._recent_prompt_tokens = RecentRate(), RecentRate()
        self._recent_requests, self._recent_faults = RecentRate(), RecentRate()
        self._calls_started: Counter[Method] = Counter()
        self._calls_handled: Counter[tuple[Method, str]] = Counter()
        self._callers_refused: Counter[str] = Counter()
        self._files_refused: Counter[str] = Counter()
        self._call_seconds: dict[Method, Histogram] = {}

    # Calls of gRPC

    def call_started(self, method: Method) -> None:
        """A call has come in."""
        self._calls_started[method] += 1

    def call_handled(self, method: Method, code: str, seconds: float) -> None:
        """code: the name of the status that the call ended with."""
        self._calls_handled[method, code] += 1
        histogram = self._call_seconds.get(method)
        if histogram is None:
            histogram = self._call_seconds[method] = Histogram(CALL_BOUNDS)
        histogram.observe(seconds)

    def caller_refused(self, cause: RefusalCause) -> None:
        """A call ended since its caller was not known, or not allowed to make it."""
        self._callers_refused[cause.value] += 1

    def file_refused(self, kind: str) -> None:
        """A file that changed had a fault; what was read before stays in force. kind: what it holds."""
        self._files_refused[kind] += 1

    # The engine's requests

    def accepted(
        self, event: AcceptedEvent, arrival_time: float, tenant: str = "", *, is_resumed: bool = False
    ) -> None:
        """A request was accepted. arrival_time: on the engine's clock. is_resumed: its answer had begun
        elsewhere, or here on a connection that was lost."""
        self._num_resumed += is_resumed
        tenant = self._tenants.of(tenant)
        self._timelines[event.request_id] = _Timeline(arrival_time, tenant)
        self._num_prompt_tokens += event.num_prompt_tokens
        self._tenant_prompt_tokens[tenant] += event.num_prompt_tokens
        self._recent_prompt_tokens.add(event.num_prompt_tokens, arrival_time)

    def refused(self, error: PageturnerError) -> None:
        """A request was refused with this error before it was accepted."""
        self._refusals[error.counted_as] += 1

    def stalled(self) -> None:
        """Nothing went forward for `stall_seconds`."""
        self._num_stalls += 1

    def gave_up(self) -> None:
        """A request was given up, since nothing could be scheduled."""
        self._num_given_up += 1

    def observe(self, events: Iterable[Event], now: float) -> None:
        """Events of one step, as they leave it at `now`."""
        num_tokens = 0
        for event in events:
            if type(event) is TokenEvent:
                num_tokens += self._observe_tokens(event, now)
            elif isinstance(event, ChoiceFinishedEvent):
                self._successes[event.reason.value] += 1
            elif isinstance(event, FinishedEvent):
                self._observe_finish(event, now)
            elif isinstance(event, ScoredTokensEvent):
                self._num_scored_tokens += len(event.tokens)
        if num_tokens:
            self._num_generation_tokens += num_tokens
            self._recent_tokens.add(num_tokens, now)

    def recent(self, now: float) -> RecentLoad:
        """What came and went of late. now: on the engine's clock."""
        return RecentLoad(
            generation_tokens_per_second=self._recent_tokens.per_second(now),
            prompt_tokens_per_second=self._recent_prompt_tokens.per_second(now),
            requests_per_second=self._recent_requests.per_second(now),
            faults_per_second=self._recent_faults.per_second(now),
        )

    def snapshot(self, stats: SchedulerStats = NO_STATS) -> MetricsSnapshot:
        """All of it at one moment. stats: the figures of the scheduler then, if there is one yet."""
        held = stats.num_blocks_used
        return MetricsSnapshot(
            counters={
                "prompt_tokens_total": self._num_prompt_tokens,
                "generation_tokens_total": self._num_generation_tokens,
                "scored_tokens_total": self._num_scored_tokens,
                "requests_given_up_total": self._num_given_up,
                "requests_resumed_total": self._num_resumed,
                "engine_stalls_total": self._num_stalls,
                "num_preemptions_total": stats.num_swap_preemptions_total
                + stats.num_recompute_preemptions_total
                + stats.num_tail_preemptions_total,
                "prefix_cache_queries_total": stats.num_prefix_query_tokens_total,
                "prefix_cache_hits_total": stats.num_prefix_hit_tokens_total,
                "spec_decode_num_draft_tokens_total": stats.num_drafted_tokens_total,
                "spec_decode_num_accepted_tokens_total": stats.num_accepted_drafts_total,
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
                "request_prefill_time_seconds": self._prefill_time.snapshot(),
                "request_decode_time_seconds": self._decode_time.snapshot(),
                "request_prompt_tokens": self._prompt_lengths.snapshot(),
                "request_generation_tokens": self._output_lengths.snapshot(),
            },
            requests_finished_total=dict(self._outcomes),
            requests_refused_total=dict(self._refusals),
            requests_shed_total=dict(self._sheds),
            request_success_total=dict(self._successes),
            tenant_requests_total=dict(self._tenant_outcomes),
            tenant_prompt_tokens_total=dict(self._tenant_prompt_tokens),
            tenant_generation_tokens_total=dict(self._tenant_output_tokens),
            grpc_server_started_total=dict(self._calls_started),
            grpc_server_handled_total=dict(self._calls_handled),
            callers_refused_total=dict(self._callers_refused),
            files_refused_total=dict(self._files_refused),
            grpc_server_handling_seconds={
                method: histogram.snapshot() for method, histogram in dict(self._call_seconds).items()
            },
        )

    def _observe_tokens(self, event: TokenEvent, now: float) -> int:
        """How many tokens there were to count."""
        num_tokens = len(event.tokens)
        timeline = self._timelines.get(event.request_id)
        if not num_tokens or timeline is None:
            return 0
        times, index = timeline.last_token_time, event.index
        last = times.get(index)
        if last is not None:
            self._inter_token_latency.observe((now - last) / num_tokens, num_tokens)
        elif not times:
            self._time_to_first_token.observe(now - timeline.arrival_time)
        times[index] = now
        return num_tokens

    def _observe_finish(self, event: FinishedEvent, now: float) -> None:
        error, usage, timings = event.error, event.usage, event.timings
        outcome = "ok" if error is None else error.counted_as
        self._outcomes[outcome] += 1
        self._recent_requests.add(1, now)
        if isinstance(error, _FAULTS):
            self._recent_faults.add(1, now)
        if isinstance(error, _SHED_BY) and not usage.num_output_tokens:
            self._sheds[outcome] += 1
        self._queue_time.observe(timings.queue_seconds)
        self._prefill_time.observe(timings.prefill_seconds)
        self._decode_time.observe(timings.decode_seconds)
        self._prompt_lengths.observe(usage.num_prompt_tokens)
        self._output_lengths.observe(usage.num_output_tokens)
        timeline = self._timelines.pop(event.request_id, None)
        if timeline is not None:
            self._request_latency.observe(now - timeline.arrival_time)
            self._tenant_outcomes[timeline.tenant, outcome] += 1
            self._tenant_output_tokens[timeline.tenant] += usage.num_output_tokens
