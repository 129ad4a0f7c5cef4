"""A real server on a free local port, its log captured, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from pageturner.service.auth.proof import Authenticator
from pageturner.service.client import NEVER, Client
from pageturner.service.core.clock import MonotonicClock
from pageturner.service.engine.api import EngineClient
from pageturner.service.engine.metrics import Metrics
from pageturner.service.rpc.certificates import Certificates
from pageturner.service.rpc.options import ServerOptions
from pageturner.service.rpc.server import Server
from pageturner.service.rpc.tracing import CallTracer


@dataclass(frozen=True, slots=True)
class Served:
    """channel: for what the client does not offer. admin_port: 0 where there is none."""

    server: Server
    metrics: Metrics
    port: int
    admin_port: int
    client: Client
    channel: grpc.aio.Channel
    log: structlog.testing.LogCapture


def capturing_logger() -> tuple[structlog.typing.FilteringBoundLogger, structlog.testing.LogCapture]:
    capture = structlog.testing.LogCapture()
    logger: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        None, processors=[capture], wrapper_class=structlog.make_filtering_bound_logger(0)
    )
    return logger, capture


def new_server(
    options: ServerOptions,
    engine: EngineClient | None = None,
    *,
    logger: structlog.typing.FilteringBoundLogger | None = None,
    metrics: Metrics | None = None,
    write_timeout_seconds: float = 60.0,
    authenticator: Authenticator | None = None,
    certificates: Certificates | None = None,
    tracer: CallTracer | None = None,
) -> Server:
    """Not started. engine: None while the model loads."""
    server = Server(
        options,
        logger or capturing_logger()[0],
        MonotonicClock(),
        metrics or Metrics(),
        write_timeout_seconds=write_timeout_seconds,
        authenticator=authenticator,
        certificates=certificates,
        tracer=tracer,
    )
    if engine is not None:
        server.attach(engine)
    return server


@asynccontextmanager
async def serving(
    engine: EngineClient | None,
    *,
    metrics: Metrics | None = None,
    write_timeout_seconds: float = 60.0,
    authenticator: Authenticator | None = None,
    certificates: Certificates | None = None,
    tracer: CallTracer | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    """Stops at once on the way out, unless the options say how long to drain. engine: None while it loads."""
    logger, capture = capturing_logger()
    metrics = metrics or Metrics()
    server = new_server(
        ServerOptions(**{"port": 0, **options}),
        engine,
        logger=logger,
        metrics=metrics,
        write_timeout_seconds=write_timeout_seconds,
        authenticator=authenticator,
        certificates=certificates,
        tracer=tracer,
    )
    port = await server.start()
    target = f"127.0.0.1:{port}"
    try:
        async with Client(target, retry=NEVER) as client, grpc.aio.insecure_channel(target) as channel:
            yield Served(server, metrics, port, server.admin_port, client, channel, capture)
    finally:
        await server.stop()
