"""A real server on a free local port, its log captured, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from pageturner.service.client import Client
from pageturner.service.core.clock import MonotonicClock
from pageturner.service.engine.api import EngineClient
from pageturner.service.rpc.options import ServerOptions
from pageturner.service.rpc.server import Server


@dataclass(frozen=True, slots=True)
class Served:
    """channel: for what the client does not offer."""

    server: Server
    port: int
    client: Client
    channel: grpc.aio.Channel
    log: structlog.testing.LogCapture


def capturing_logger() -> tuple[structlog.typing.FilteringBoundLogger, structlog.testing.LogCapture]:
    capture = structlog.testing.LogCapture()
    logger: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        None, processors=[capture], wrapper_class=structlog.make_filtering_bound_logger(0)
    )
    return logger, capture


@asynccontextmanager
async def serving(engine: EngineClient, **options: Any) -> AsyncIterator[Served]:
    """Stops at once on the way out, unless the options say how long to drain."""
    logger, capture = capturing_logger()
    server = Server(engine, ServerOptions(**{"port": 0, **options}), logger, MonotonicClock())
    port = await server.start()
    target = f"127.0.0.1:{port}"
    try:
        async with Client(target) as client, grpc.aio.insecure_channel(target) as channel:
            yield Served(server, port, client, channel, capture)
    finally:
        await server.stop()
