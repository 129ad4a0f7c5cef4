"""What counting, tracing and being scraped cost: per token, per call and per scrape, without a model."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric

from pageturner.policies.views import Rates
from pageturner.service.core.clock import MonotonicClock
from pageturner.service.core.listener import AddRequest, CallOutcome, Update
from pageturner.service.core.outputs import (
    Event,
    FinishedEvent,
    RequestTimings,
    SampledToken,
    SchedulerOutput,
    SchedulerStats,
    TokenEvent,
    Usage,
)
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.engine.api import (
    AcceptedEvent,
    AdapterFigures,
    Condition,
    EngineHealth,
    ModelInfo,
    ServerInfo,
)
from pageturner.service.engine.metrics import Method, Metrics
from pageturner.service.flight.phases import PhaseRecorder
from pageturner.service.monitoring.exposition import Observation, ServedEngine, families
from pageturner.service.policy_host.reports import PoliciesInfo

NUM_REQUESTS = 64
NUM_STEPS = 400
NUM_SCRAPES = 20
TRACE_PARENT = f"00-{'1' * 32}-{'2' * 16}-01"


@dataclass(frozen=True, slots=True)
class MonitoringCost:
    """Medians. Of a token in a step of NUM_REQUESTS decodes: loop_ns for going round the events alone,
    metrics_ns for counting them beside that, traced_ns for telling phases where every request is traced.

    accept_us: of a request from acceptance to its end. scrape_us: on the event loop. text_ms: beside it, of
    text_bytes, with as many tenants as are told apart.
    """

    loop_ns: float
    metrics_ns: float
    traced_ns: float
    accept_us: float
    scrape_us: float
    text_ms: float
    text_bytes: int


def measure_monitoring(num_steps: int = NUM_STEPS) -> MonitoringCost:
    """All of it, the parts in turns."""
    names = [f"request-{index}" for index in range(NUM_REQUESTS)]
    token = (SampledToken(1),)
    events: tuple[Event, ...] = tuple(TokenEvent(name, 0, token, "x") for name in names)
    metrics, recorder = Metrics(), PhaseRecorder(lambda _: None, MonotonicClock())
    for name in names:
        metrics.accepted(AcceptedEvent(name, 0, 100, 100), 0.0, name)
        _track(recorder, name)
    update = Update(SchedulerOutput(0, ()), (), 0.0)
    outcome = CallOutcome(events)
    now = 0.0

    def count() -> None:
        nonlocal now
        now += 0.01
        metrics.observe(events, now)

    loop, counted, traced = _in_turns(
        (lambda: _go_round(events), count, lambda: recorder.after(update, outcome)), num_steps
    )
    accept = _accept_seconds(num_steps)
    observation = _observation(metrics)
    (scrape,) = _in_turns((lambda: metrics.snapshot(SchedulerStats()),), num_steps)
    picture = _Picture(observation)
    (text,) = _in_turns((lambda: generate_latest(picture),), min(NUM_SCRAPES, num_steps))
    size = len(generate_latest(picture))
    per_token = 1e9 / NUM_REQUESTS
    return MonitoringCost(
        loop_ns=loop * per_token,
        metrics_ns=(counted - loop) * per_token,
        traced_ns=traced * per_token,
        accept_us=accept * 1e6,
        scrape_us=scrape * 1e6,
        text_ms=text * 1e3,
        text_bytes=size,
    )


@dataclass(frozen=True, slots=True)
class _Picture:
    """An observation, as prometheus_client takes a registry."""

    seen: Observation

    def collect(self) -> Iterator[Metric]:
        return families(self.seen)


def _go_round(events: tuple[Event, ...]) -> int:
    num_tokens = 0
    for event in events:
        if type(event) is TokenEvent:
            num_tokens += len(event.tokens)
    return num_tokens


def _track(recorder: PhaseRecorder, name: str) -> None:
    new = NewRequest(name, (1,), SamplingParams(), 0, 0.0, trace_parent=TRACE_PARENT)
    recorder.after(AddRequest(new), CallOutcome())


def _accept_seconds(num_steps: int) -> float:
    metrics = Metrics()
    ended = FinishedEvent("r", Usage(100, 0, 100), RequestTimings(0.1, 0.1, 0.1, 0, 0, 0))

    def live() -> None:
        metrics.accepted(AcceptedEvent("r", 0, 100, 100), 0.0, "tenant")
        metrics.observe((ended,), 1.0)

    (seconds,) = _in_turns((live,), num_steps)
    return seconds


def _observation(metrics: Metrics) -> Observation:
    for method in ("Generate", "GenerateStream", "Tokenize", "Abort", "GetLoad", "Check"):
        named = Method("unary", "pageturner.v1.GenerationService", method)
        metrics.call_started(named)
        metrics.call_handled(named, "OK", 0.1)
    for index in range(NUM_REQUESTS):
        ended = FinishedEvent(f"request-{index}", Usage(100, 0, 100), RequestTimings(0.1, 0.1, 0.1, 0, 0, 0))
        metrics.observe((ended,), 1e6)
    model = ModelInfo("m", "s", "a", "b", "float32", True, 1, 1, 1, 1, 1, 1, (), False)
    server = ServerInfo("1", 0.0, 0.0, 16, 1, 1, 1, 1, 1, "k", Rates(), {})
    served = ServedEngine(model, server, SchedulerStats(), PoliciesInfo(1, ()), AdapterFigures())
    return Observation(metrics.snapshot(), Condition(EngineHealth.SERVING), served)


def _in_turns(parts: tuple[Callable[[], object], ...], num_rounds: int) -> list[float]:
    """The median seconds of each."""
    seconds: list[list[float]] = [[] for _ in parts]
    gc.disable()
    try:
        for _ in range(num_rounds):
            for part, own in zip(parts, seconds, strict=True):
                begun = time.perf_counter()
                part()
                own.append(time.perf_counter() - begun)
    finally:
        gc.enable()
    return [statistics.median(own) for own in seconds]
