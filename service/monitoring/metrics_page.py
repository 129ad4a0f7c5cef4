"""/metrics: one picture of the service for all who ask within a moment, drawn beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric

from pageturner.service.core.clock import Clock
from pageturner.service.engine.api import Condition, EngineClient
from pageturner.service.engine.metrics import NO_STATS, Metrics
from pageturner.service.monitoring.exposition import Observation, ServedEngine, families
from pageturner.service.monitoring.routes import HttpRequest, HttpResponse

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
FRESH_SECONDS = 0.5
"""A picture that is no older is shown again: a flood of scrapes costs no more than two a second."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where what is shown comes from; all are read on the event loop. engine: None while it loads."""

    metrics: Metrics
    condition: Callable[[], Condition]
    engine: Callable[[], EngineClient | None]
    num_log_lines_lost: Callable[[], int]
    certificate_ends: Callable[[], float | None] = lambda: None

    def observe(self) -> Observation:
        """All of it at one moment, frozen."""
        engine, stats = self.engine(), NO_STATS
        served: ServedEngine | None = None
        if engine is not None:
            stats = engine.load()
            served = ServedEngine(
                engine.models()[0], engine.server_info(), stats, engine.policies(), engine.adapter_figures()
            )
        snapshot, ends = self.metrics.snapshot(stats), self.certificate_ends()
        return Observation(snapshot, self.condition(), served, self.num_log_lines_lost(), ends)


class _Picture:
    """An observation beside the process's own figures, as prometheus_client takes a registry."""

    def __init__(self, seen: Observation, process: CollectorRegistry) -> None:
        self._seen = seen
        self._process = process

    def collect(self) -> Iterator[Metric]:
        """The families of both."""
        yield from families(self._seen)
        yield from self._process.collect()


class MetricsPage:
    """Answers in the text format, which every scraper takes. (OpenMetrics' writer in prometheus_client 0.26
    changes the colon in names of samples.)

    The figures are read on the loop, which takes some tens of microseconds; the text is made of frozen
    values in a thread, once for all who wait for it.
    """

    def __init__(self, sources: Sources, clock: Clock, fresh_seconds: float = FRESH_SECONDS) -> None:
        self._sources = sources
        self._clock = clock
        self._fresh_seconds = fresh_seconds
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self._made_at = clock.now()
        self._text: asyncio.Task[bytes] | None = None

    async def answer(self, _: HttpRequest) -> HttpResponse:
        """Of this moment, or as of FRESH_SECONDS ago."""
        now, text = self._clock.now(), self._text
        if text is None or (text.done() and now - self._made_at >= self._fresh_seconds):
            picture = _Picture(self._sources.observe(), self._process)
            text = asyncio.create_task(asyncio.to_thread(generate_latest, picture))
            self._made_at, self._text = now, text
        # Others may wait for it too: one that leaves must not take it from them.
        return HttpResponse(await asyncio.shield(text), TEXT_FORMAT)
