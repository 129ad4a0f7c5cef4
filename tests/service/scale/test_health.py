"""Health of an application is what one server would say of its engine."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from grpc_health.v1 import health_pb2 as pb

from pageturner.service.rpc.health import LIVENESS
from pageturner.service.rpc.status import UnknownService
from pageturner.service.scale.health import SERVICES, ApplicationHealth

SERVING, NOT_SERVING = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING


class Replicas:
    is_ready = True

    async def ask(self) -> bool:
        return self.is_ready


async def test_each_service_is_asked_by_name_and_others_are_not_known() -> None:
    replicas = Replicas()
    health = ApplicationHealth(replicas.ask, asyncio.sleep)
    for name in ("", *SERVICES, LIVENESS):
        assert (await health.check(name)).status == SERVING, name
    with pytest.raises(UnknownService, match="nobody's"):
        await health.check("nobody's")
    replicas.is_ready = False
    told = {name: each.status for name, each in (await health.every()).statuses.items()}
    assert told == dict.fromkeys(("", *SERVICES), NOT_SERVING) | {LIVENESS: SERVING}


async def test_a_watch_tells_changes_and_what_is_not_known() -> None:
    replicas, looks = Replicas(), 0

    async def look(_seconds: float) -> None:
        nonlocal looks
        looks += 1
        replicas.is_ready = looks < 3

    health = ApplicationHealth(replicas.ask, look)
    async with aclosing(health.watch("")) as changes:
        assert [(await anext(changes)).status for _ in "12"] == [SERVING, NOT_SERVING]
    assert looks == 3
    async with aclosing(health.watch("nobody's")) as changes:
        assert (await anext(changes)).status == pb.HealthCheckResponse.SERVICE_UNKNOWN
