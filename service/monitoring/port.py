"""The monitoring port: its pages, from before the model loads to the end of the process."""

from __future__ import annotations

from collections.abc import Iterable

from structlog.typing import FilteringBoundLogger

from pageturner.service.core.clock import Clock
from pageturner.service.monitoring.http_server import HttpServer
from pageturner.service.monitoring.live_page import LivePage
from pageturner.service.monitoring.metrics_page import FRESH_SECONDS, MetricsPage, Sources
from pageturner.service.monitoring.probes import add_probes
from pageturner.service.monitoring.routes import Router


class MonitoringPort:
    """router: for more pages, which are added before `start`. fresh_seconds: as `MetricsPage`
    says. names: as `HttpServer` says."""

    def __init__(
        self,
        sources: Sources,
        clock: Clock,
        logger: FilteringBoundLogger,
        fresh_seconds: float = FRESH_SECONDS,
        names: Iterable[str] = (),
    ) -> None:
        self.router = Router()
        self.router.add("/metrics", MetricsPage(sources, clock, fresh_seconds).answer)
        add_probes(self.router, sources.condition)
        LivePage(sources.condition, sources.engine, clock).add_to(self.router)
        self._server = HttpServer(self.router, logger, names=names)
        self._logger = logger

    async def start(self, host: str, port: int) -> int:
        """Listen; the port in force. Raises ConfigError."""
        bound = await self._server.start(host, port)
        self._logger.info("monitoring", host=host, port=bound)
        return bound

    async def aclose(self) -> None:
        """Stop listening, end what is open. Closing twice is no error."""
        await self._server.aclose()
