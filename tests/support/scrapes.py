"""What Prometheus would take from the monitoring port of a server under test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from pageturner.service.core.clock import MonotonicClock
from pageturner.service.engine.metrics import Metrics
from pageturner.service.monitoring.metrics_page import Sources
from pageturner.service.monitoring.port import MonitoringPort
from pageturner.service.rpc.server import Server
from support.http_pages import Page, get
from support.serving import capturing_logger

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """Samples by name and labels, but for model_name."""

    samples: dict[tuple[str, Labels], float]
    text: str

    def value(self, name: str, **labels: str) -> float:
        """0 for one that is not there, as in a query that sums."""
        return self.samples.get((name, frozenset(labels.items())), 0.0)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Samples of a name, by one label."""
        return {
            dict(labels)[label]: value for (found, labels), value in self.samples.items() if found == name
        }

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.samples}


def parse(page: Page) -> Scrape:
    """Raises ValueError for what Prometheus would not take, such as a sample that comes twice."""
    samples: dict[tuple[str, Labels], float] = {}
    for family in text_string_to_metric_families(page.body):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            key = sample.name, frozenset(labels.items())
            if key in samples:
                raise ValueError(f"{key} comes twice")
            samples[key] = sample.value
    return Scrape(samples, page.body)


@dataclass(frozen=True, slots=True)
class Monitored:
    port: int

    async def scrape(self) -> Scrape:
        page = await get(self.port, "/metrics")
        assert page.status == 200
        return parse(page)


@asynccontextmanager
async def monitoring(server: Server, metrics: Metrics, num_lines_lost: int = 0) -> AsyncIterator[Monitored]:
    """A port beside the server. Each scrape is of its own moment."""
    sources = Sources(metrics, lambda: server.condition, lambda: server.engine, lambda: num_lines_lost)
    monitored = MonitoringPort(sources, MonotonicClock(), capturing_logger()[0], fresh_seconds=0.0)
    port = await monitored.start("127.0.0.1", 0)
    try:
        yield Monitored(port)
    finally:
        await monitored.aclose()
