"""The gRPC server: what it serves, on which port, and how it ends."""

from __future__ import annotations

import errno
import socket
import uuid
from collections.abc import Callable

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pageturner.service.core.clock import Clock
from pageturner.service.engine.api import EngineClient
from pageturner.service.errors import ConfigError, Draining
from pageturner.service.rpc.admin import AdminServicer
from pageturner.service.rpc.generation import GenerationServicer
from pageturner.service.rpc.health import HealthServicer
from pageturner.service.rpc.interceptors import CallInterceptor, CallMetrics
from pageturner.service.rpc.lifecycle import ENDED_TEXT, Lifecycle
from pageturner.service.rpc.models import ModelServicer
from pageturner.service.rpc.options import ServerOptions
from pageturner.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)

STOP_SECONDS = 0.5
"""Grace of gRPC's own stop: for last messages to leave. All that may take longer has ended by then."""

OWN_SERVICES = frozenset(
    service.full_name
    for file in (generation_pb2, model_pb2, admin_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
)


def _random_request_id() -> str:
    return uuid.uuid4().hex


class Server:
    """Serves one engine. The engine is the caller's: it is neither started nor stopped here."""

    def __init__(
        self,
        engine: EngineClient,
        options: ServerOptions,
        logger: structlog.typing.FilteringBoundLogger,
        clock: Clock,
        new_request_id: Callable[[], str] = _random_request_id,
    ) -> None:
        self.metrics = CallMetrics()
        self._engine = engine
        self._options = options
        self._logger = logger
        self._clock = clock
        self._new_request_id = new_request_id
        self._lifecycle = Lifecycle()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Listen; the port in force. Raises ConfigError when the address cannot be had."""
        assert self._server is None, "a server starts once"
        server = grpc.aio.server(
            interceptors=[
                CallInterceptor(
                    self._logger,
                    self._clock,
                    self.metrics,
                    write_timeout_seconds=self._options.write_timeout_seconds,
                )
            ],
            options=self._options.channel_arguments(),
        )
        self._register(server)
        try:
            port = server.add_insecure_port(self._options.address)
        except RuntimeError as error:
            check_address(self._options)  # gRPC says only that it could not bind
            raise ConfigError("server.port", f"cannot listen on {self._options.address}") from error
        await server.start()
        self._server = server
        self._logger.info("listening", host=self._options.host, port=port)
        return port

    async def drain(self) -> None:
        """End in order: refuse new requests, let the running ones finish for drain_seconds, end the
        rest (UNAVAILABLE), then close. Safe to call twice."""
        self._lifecycle.draining.set()
        self._logger.info("draining", num_live=len(self._lifecycle.live_request_ids))
        await self._lifecycle.wait_idle(self._options.drain_seconds)
        await self.stop()

    async def stop(self) -> None:
        """As `drain`, without waiting for what runs. May overtake a drain in progress."""
        self._lifecycle.draining.set()
        for request_id in self._lifecycle.live_request_ids:
            self._logger.warning("aborted_by_shutdown", request_id=request_id)
            await self._engine.abort(request_id, Draining(ENDED_TEXT))
        await self._lifecycle.wait_idle(self._options.abort_seconds)
        self._lifecycle.stopping.set()
        if self._server is not None:
            await self._server.stop(STOP_SECONDS)
        # gRPC cancelled whatever was left; its clean-up must not be cut off by the end of the loop.
        await self._lifecycle.wait_idle(self._options.abort_seconds)

    async def wait_for_termination(self) -> None:
        assert self._server is not None, "the server was started"
        await self._server.wait_for_termination()

    def _register(self, server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(
                self._engine, self._options, self._lifecycle, self._logger, self._new_request_id
            ),
            server,
        )
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(self._engine), server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminServicer(self._engine, self._options, self._lifecycle), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(  # type: ignore[no-untyped-call] # has no types
            HealthServicer(self._engine, self._lifecycle, OWN_SERVICES), server
        )
        health = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        names = (*sorted(OWN_SERVICES), health, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)  # type: ignore[no-untyped-call] # has no types


def check_address(options: ServerOptions) -> None:
    """Raise ConfigError, with the system's reason, if nobody could listen there now."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As gRPC does: connections of an earlier server that linger do not hold the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        reason = f"cannot listen on {options.address}: {error.strerror or error}"
        if error.errno == errno.EADDRINUSE:
            reason = f"{options.address} is in use: another server listens there"
        raise ConfigError("server.port", reason) from error
