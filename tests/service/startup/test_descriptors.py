"""The limit on open files, raised at start, and the bound on connections that follows from it."""

from __future__ import annotations

import asyncio
import resource

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from support.real_service import real_service

from pageturner.service.errors import ConfigError
from pageturner.service.rpc.options import ServerOptions
from pageturner.service.startup.descriptors import (
    ENOUGH,
    RESERVED,
    Limits,
    connection_limit,
    raise_descriptor_limit,
)

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "in_force"),
    [
        ((1024, 4096), (1024, 4096)),
        ((4096, 4096), (4096, 4096)),
        ((1024, UNLIMITED), (1024, ENOUGH)),
        ((UNLIMITED, UNLIMITED), (ENOUGH, ENOUGH)),
    ],
)
def test_the_soft_limit_becomes_the_hard_one(limits: Limits, in_force: Limits) -> None:
    written: list[Limits] = []
    assert raise_descriptor_limit(lambda name: limits, lambda name, new: written.append(new)) == in_force
    assert written == ([] if in_force[0] == in_force[1] else [(in_force[1], limits[1])])


def test_a_system_that_refuses_keeps_its_limit() -> None:
    def refuse(name: int, new: Limits) -> None:
        raise ValueError("current limit exceeds maximum limit")

    assert raise_descriptor_limit(lambda name: (256, 4096), refuse) == (256, 256)


def test_connections_leave_descriptors_for_the_rest() -> None:
    assert connection_limit(1024, None) == 1024 - RESERVED
    assert connection_limit(16, None) == 1
    assert connection_limit(1024, 100) == 100
    with pytest.raises(ConfigError, match="over 768: the process may open 1024 files"):
        connection_limit(1024, 769)
    with pytest.raises(ConfigError, match=r"server\.max_connections: 0 is not at least 1"):
        ServerOptions(max_connections=0)


async def test_a_connection_too_many_is_closed_at_once_and_taken_when_another_has_gone() -> None:
    """The client learns it in one round trip, and not from a timeout; those that are there go on."""
    async with real_service(server_options={"max_connections": 2}) as service:
        await service.client.load()

        def connect() -> grpc.aio.Channel:
            return grpc.aio.insecure_channel(service.target, options=[("grpc.use_local_subchannel_pool", 1)])

        async def code(channel: grpc.aio.Channel) -> grpc.StatusCode:
            check = HealthStub(channel).Check(HealthCheckRequest())  # type: ignore[no-untyped-call] # has no types
            answered: grpc.StatusCode = await check.code()
            return answered

        async with connect() as second:
            assert await code(second) is grpc.StatusCode.OK
            async with connect() as third:
                assert await code(third) is grpc.StatusCode.UNAVAILABLE
            assert await code(second) is grpc.StatusCode.OK
        async with asyncio.timeout(30):
            while True:
                async with connect() as fourth:
                    if await code(fourth) is grpc.StatusCode.OK:
                        break
