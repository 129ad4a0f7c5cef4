"""grpc.health.v1 of an application: SERVING while one of its replicas is ready. Knows nothing of Ray."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from grpc_health.v1 import health_pb2 as pb

from pageturner.service.rpc.health import LIVENESS
from pageturner.service.rpc.status import UnknownService
from pageturner.v1 import admin_pb2, generation_pb2, model_pb2

WATCH_SECONDS = 1.0
"""Between two looks for one who watches."""

SERVICES = frozenset(
    service.full_name
    for module in (generation_pb2, model_pb2, admin_pb2, pb)
    for service in module.DESCRIPTOR.services_by_name.values()
)
_NAMES = SERVICES | {"", LIVENESS}


class ApplicationHealth:
    """is_ready: whether a replica is. sleep: between two looks."""

    def __init__(
        self, is_ready: Callable[[], Awaitable[bool]], sleep: Callable[[float], Awaitable[object]]
    ) -> None:
        self._is_ready = is_ready
        self._sleep = sleep

    async def check(self, service: str) -> pb.HealthCheckResponse:
        """As one server answers; what has no replica is alive, since Ray starts another. Raises
        UnknownService."""
        if service not in _NAMES:
            raise UnknownService(f"no service {service!r} here")
        return pb.HealthCheckResponse(status=await self._status(service))

    async def every(self) -> pb.HealthListResponse:
        """Of all services."""
        status = await self._status("")
        return pb.HealthListResponse(
            statuses={
                name: pb.HealthCheckResponse(
                    status=status if name != LIVENESS else pb.HealthCheckResponse.SERVING
                )
                for name in _NAMES
            }
        )

    async def watch(self, service: str) -> AsyncGenerator[pb.HealthCheckResponse, None]:
        """At once, and at each change; never ends."""
        told: Any = None
        while True:
            status = await self._status(service)
            if status != told:
                told = status
                yield pb.HealthCheckResponse(status=status)
            await self._sleep(WATCH_SECONDS)

    async def _status(self, service: str) -> Any:
        if service not in _NAMES:
            return pb.HealthCheckResponse.SERVICE_UNKNOWN
        if service == LIVENESS:
            return pb.HealthCheckResponse.SERVING
        is_ready = await self._is_ready()
        return pb.HealthCheckResponse.SERVING if is_ready else pb.HealthCheckResponse.NOT_SERVING
