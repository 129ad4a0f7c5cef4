"""grpc.health.v1: the engine's own health, read each time it is asked."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthServicer as HealthServiceServicer

from pageturner.service.engine.api import EngineHealth
from pageturner.service.errors import Draining
from pageturner.service.rpc.lifecycle import STOPPING_TEXT, Lifecycle, wait_for_first
from pageturner.service.rpc.status import UnknownService

Status = pb.HealthCheckResponse.ServingStatus
Context = grpc.aio.ServicerContext


LIVENESS = "liveness"
"""A name to ask health for that is SERVING as long as waiting can help: for probes that restart a process."""


class HealthServicer(HealthServiceServicer):
    """Every service here, and "" for the server, is SERVING while the engine is.

    NOT_SERVING from the first moment on, while the model loads. LIVENESS alone goes by whether the engine is
    dead.
    """

    def __init__(self, lifecycle: Lifecycle, services: frozenset[str]) -> None:
        self._lifecycle = lifecycle
        self._services = services | {"", LIVENESS}

    async def Check(
        self,
        request: pb.HealthCheckRequest,
        context: Context[pb.HealthCheckRequest, pb.HealthCheckResponse],
    ) -> pb.HealthCheckResponse:
        status = self._status(request.service, self._lifecycle.health)
        if status == pb.HealthCheckResponse.SERVICE_UNKNOWN:
            raise UnknownService(f"no service {request.service!r} here")
        return pb.HealthCheckResponse(status=status)

    async def List(
        self,
        request: pb.HealthListRequest,
        context: Context[pb.HealthListRequest, pb.HealthListResponse],
    ) -> pb.HealthListResponse:
        health = self._lifecycle.health
        statuses = {
            service: pb.HealthCheckResponse(status=self._status(service, health))
            for service in self._services
        }
        return pb.HealthListResponse(statuses=statuses)

    async def Watch(
        self,
        request: pb.HealthCheckRequest,
        context: Context[pb.HealthCheckRequest, pb.HealthCheckResponse],
    ) -> AsyncIterator[pb.HealthCheckResponse]:
        """Ends when the server stops, its last status told: an open watch must not hold a shutdown."""
        sent = None
        while True:
            known = self._lifecycle.health
            status = self._status(request.service, known)
            if status != sent:
                yield pb.HealthCheckResponse(status=status)
                sent = status
            elif self._lifecycle.stopping.is_set():
                raise Draining(STOPPING_TEXT)
            else:
                await wait_for_first(
                    self._lifecycle.wait_for_health_change(known), self._lifecycle.stopping.wait()
                )

    def _status(self, service: str, health: EngineHealth) -> pb.HealthCheckResponse.ServingStatus:
        if service not in self._services:
            return pb.HealthCheckResponse.SERVICE_UNKNOWN
        if service == LIVENESS:
            is_dead = health is EngineHealth.DEAD
            return pb.HealthCheckResponse.NOT_SERVING if is_dead else pb.HealthCheckResponse.SERVING
        if health is EngineHealth.SERVING:
            return pb.HealthCheckResponse.SERVING
        return pb.HealthCheckResponse.NOT_SERVING
