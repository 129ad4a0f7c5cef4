"""/healthz and /readyz: whether the process can be helped by waiting, and whether it takes work."""

from __future__ import annotations

from collections.abc import Callable

from pageturner.service.engine.api import Condition
from pageturner.service.monitoring.routes import HttpRequest, HttpResponse, Router

UNAVAILABLE = 503


def add_probes(router: Router, condition: Callable[[], Condition]) -> None:
    """condition: read each time. Answers tell the reason in words.

    /healthz fails once nothing but a new start can help; loading, draining and stalling are no such thing.
    /readyz fails whenever new work would not be taken, or would wait for an engine that makes no progress.
    """

    async def healthz(_: HttpRequest) -> HttpResponse:
        now = condition()
        if now.is_alive:
            return HttpResponse.of_text(f"alive: {now.health.value}")
        return HttpResponse.of_text(f"{now.health.value}: {now.reason}", UNAVAILABLE)

    async def readyz(_: HttpRequest) -> HttpResponse:
        now = condition()
        if now.is_ready:
            return HttpResponse.of_text("ready")
        requests = f" ({now.num_live} requests left)" if now.num_live else ""
        return HttpResponse.of_text(f"{now.health.value}: {now.reason}{requests}", UNAVAILABLE)

    router.add("/healthz", healthz)
    router.add("/readyz", readyz)
