"""The gRPC server: what it serves, on which port, and how it ends."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pageturner.service.core.clock import Clock
from pageturner.service.engine.api import EngineClient
from pageturner.service.engine.metrics import Metrics
from pageturner.service.rpc.admin import AdminServicer
from pageturner.service.rpc.generation import GenerationServicer
from pageturner.service.rpc.health import HealthServicer
from pageturner.service.rpc.interceptors import CallInterceptor
from pageturner.service.rpc.lifecycle import Lifecycle
from pageturner.service.rpc.listening import Listener, listen
from pageturner.service.rpc.models import ModelServicer
from pageturner.service.rpc.options import ServerOptions
from pageturner.service.rpc.reflection import enable_reflection
from pageturner.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)

OWN_SERVICES = frozenset(
    service.full_name
    for file in (generation_pb2, model_pb2, admin_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
)


def _random_request_id() -> str:
    return uuid.uuid4().hex


class Server:
    """Listens from `start` on; serves one engine from `attach` on, and refuses with Loading before.

    Health answers from the start: NOT_SERVING while the model loads. The engine is the caller's: it is
    drained here, neither started nor closed. write_timeout_seconds: a stream is given up when its client's
    window has had no room for one more message for so long.
    """

    def __init__(
        self,
        options: ServerOptions,
        logger: structlog.typing.FilteringBoundLogger,
        clock: Clock,
        metrics: Metrics,
        *,
        write_timeout_seconds: float,
        new_request_id: Callable[[], str] = _random_request_id,
    ) -> None:
        self._options = options
        self._logger = logger
        self._clock = clock
        self._metrics = metrics
        self._write_timeout_seconds = write_timeout_seconds
        self._new_request_id = new_request_id
        self._lifecycle = Lifecycle()
        self._server: grpc.aio.Server | None = None
        self._listener: Listener | None = None

    async def start(self) -> int:
        """Listen; the port in force, or 0 for a socket file. Raises ConfigError if an address is taken."""
        assert self._server is None, "a server starts once"
        server = grpc.aio.server(
            interceptors=[
                CallInterceptor(
                    self._logger,
                    self._clock,
                    self._metrics,
                    write_timeout_seconds=self._write_timeout_seconds,
                )
            ],
            options=self._options.channel_arguments(),
        )
        self._register(server)
        self._listener = listen(server, self._options)
        await server.start()
        self._server = server
        self._logger.info("listening", host=self._options.host, port=self._listener.port)
        return self._listener.port

    def attach(self, engine: EngineClient) -> None:
        """Serve this engine from now on."""
        self._lifecycle.attach(engine)

    async def drain(self) -> None:
        """End in order: refuse new requests, let the running ones finish for drain_seconds, end the
        rest (UNAVAILABLE), then close. Safe to call twice."""
        await self._end(self._options.drain_seconds)

    async def stop(self) -> None:
        """As `drain`, without waiting for what runs. May overtake a drain in progress."""
        await self._end(0.0)

    async def _end(self, grace_seconds: float) -> None:
        if not self._lifecycle.is_loading:
            await self._lifecycle.engine.drain(grace_seconds)
        self._lifecycle.stopping.set()
        if self._server is not None:
            # Every request has ended, or was told to: what remains is to send that. Then gRPC cancels.
            await self._server.stop(self._options.abort_seconds)
        if self._listener is not None:
            self._listener.remove_socket_file()

    async def wait_for_termination(self) -> None:
        """Wait until the server has stopped."""
        assert self._server is not None, "the server was started"
        await self._server.wait_for_termination()

    def _register(self, server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(self._options, self._lifecycle, self._logger, self._new_request_id),
            server,
        )
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(self._lifecycle), server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminServicer(self._options, self._lifecycle), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(  # type: ignore[no-untyped-call] # has no types
            HealthServicer(self._lifecycle, OWN_SERVICES), server
        )
        health = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        enable_reflection((*sorted(OWN_SERVICES), health), server)
