"""Health and the end of a server: what runs may finish, what waits is refused, nothing is left open."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.fake_engine import PAUSE, FakeEngine, accepted, finished
from support.real_service import real_service
from support.serving import Served, serving

from pageturner.service.engine.api import EngineHealth
from pageturner.service.engine.metrics import Method
from pageturner.service.errors import Draining, Loading
from pageturner.service.rpc.server import OWN_SERVICES
from pageturner.service.rpc.status import UnknownStatus

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def _pausing() -> FakeEngine:
    return FakeEngine(lambda s, t: [accepted(s, t), PAUSE, finished(s, len(t), 0)])


def _health(served: Served) -> Any:
    return health_pb2_grpc.HealthStub(served.channel)  # type: ignore[no-untyped-call] # has no types


async def _check(served: Served, service: str = "") -> int:
    answer = await _health(served).Check(health_pb2.HealthCheckRequest(service=service))
    return int(answer.status)


def _watch(served: Served, service: str = "") -> Any:
    return _health(served).Watch(health_pb2.HealthCheckRequest(service=service))


async def test_sglang_11387_health_is_the_engines_own() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        watch = _watch(served)
        assert (await watch.read()).status == SERVING
        for health in EngineHealth:
            if health is EngineHealth.SERVING:
                continue
            engine.set_health(health)
            assert (await watch.read()).status == NOT_SERVING, health
            for service in ("", *OWN_SERVICES):
                assert await _check(served, service) == NOT_SERVING
            engine.set_health(EngineHealth.SERVING)
            assert (await watch.read()).status == SERVING
        for service in ("", *OWN_SERVICES):
            assert await _check(served, service) == SERVING


@pytest.mark.fault("45")
async def test_while_the_model_loads_health_answers_not_serving_and_calls_are_refused() -> None:
    engine = FakeEngine()
    async with serving(None) as served:
        watch = _watch(served)
        assert (await watch.read()).status == NOT_SERVING
        for service in ("", *OWN_SERVICES):
            assert await _check(served, service) == NOT_SERVING
        for call in (
            served.client.generate("x"),
            served.client.tokenize("x"),
            served.client.load(),
            served.client.model(),
            served.client.abort("x"),
        ):
            with pytest.raises(Loading, match="the model is loading"):
                await call
        served.server.attach(engine)
        assert (await watch.read()).status == SERVING
        assert (await served.client.generate("ok", max_tokens=2)).text == "ok"


@pytest.mark.fault("45")
async def test_a_server_that_still_loads_stops_at_once() -> None:
    async with serving(None, drain_seconds=3600) as served:
        watch = _watch(served)
        assert (await watch.read()).status == NOT_SERVING
        await served.server.drain()
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
            await watch.read()


async def test_a_watch_repeats_no_status() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        watch = _watch(served)
        assert (await watch.read()).status == SERVING
        engine.set_health(EngineHealth.STARTING)
        assert (await watch.read()).status == NOT_SERVING
        engine.set_health(EngineHealth.DRAINING)
        assert await _check(served) == NOT_SERVING  # a whole call in which the watch could have spoken
        engine.set_health(EngineHealth.SERVING)
        assert (await watch.read()).status == SERVING


async def test_a_service_that_is_not_here() -> None:
    async with serving(FakeEngine()) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _check(served, "pageturner.v1.NoService")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = _watch(served, "pageturner.v1.NoService")
        assert (await watch.read()).status == SERVICE_UNKNOWN
        check = Method("unary", "grpc.health.v1.Health", "Check")
        assert served.metrics.snapshot().grpc_server_handled_total == {(check, "NOT_FOUND"): 1}


async def test_the_client_can_wait_for_a_server_that_starts() -> None:
    engine = FakeEngine()
    engine.set_health(EngineHealth.STARTING)
    async with serving(engine) as served:
        waiting = asyncio.create_task(served.client.wait_until_serving(30))
        assert await _check(served) == NOT_SERVING
        assert not waiting.done()
        engine.set_health(EngineHealth.SERVING)
        await waiting


async def test_a_drain_lets_the_running_finish_and_refuses_the_new() -> None:
    engine = _pausing()
    async with serving(engine, drain_seconds=60) as served:
        watch = _watch(served)
        assert (await watch.read()).status == SERVING
        running = asyncio.create_task(served.client.generate("x", request_id="old"))
        await engine.reached("paused old")
        drain = asyncio.create_task(served.server.drain())
        assert (await watch.read()).status == NOT_SERVING
        with pytest.raises(Draining):
            await served.client.generate("y")
        with pytest.raises(Draining):
            _ = [item async for item in served.client.stream("y")]
        assert not drain.done()
        engine.resume("old")
        assert (await running).request_id == "old"
        await drain
    assert engine.aborts == []
    assert [request.request_id for request in engine.requests] == ["old"]


async def test_a_drain_that_takes_too_long_aborts_the_rest() -> None:
    engine = _pausing()
    async with serving(engine, drain_seconds=0) as served:
        calls = [asyncio.create_task(served.client.generate("x", request_id=f"r{i}")) for i in range(3)]
        for i in range(3):
            await engine.reached(f"paused r{i}")
        await served.server.drain()
        for call in calls:
            with pytest.raises(Draining, match="shutting down; this request"):
                await call
    assert sorted(engine.aborts) == ["r0", "r1", "r2"]
    assert engine.live == {}


async def test_what_a_drain_ended_says_so_to_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    async with real_service(server_options={"drain_seconds": 0}) as service:
        drain = service.engine.drain

        async def drain_and_go_on(grace_seconds: float) -> None:
            await drain(grace_seconds)
            service.release_steps()

        service.hold_steps()
        call = asyncio.create_task(service.client.generate("x", request_id="r", max_tokens=30))
        await service.run_steps(2)
        monkeypatch.setattr(service.engine, "drain", drain_and_go_on)
        await service.server.drain()
        with pytest.raises(Draining, match="shutting down; this request was not done in time"):
            await call
        await service.until(lambda: service.num_handled("UNAVAILABLE") == 1)  # the client may be told first


async def test_grpc_dotnet_2572_open_watches_do_not_hold_the_shutdown() -> None:
    """They end by themselves, before gRPC's own stop has to cancel anything."""
    engine = FakeEngine()
    async with serving(engine, drain_seconds=3600) as served:
        watches = [_watch(served, service) for service in ("", "pageturner.v1.AdminService", "unknown")]
        for watch in watches:
            await watch.read()
        loads = served.client.watch_load(3600)
        await anext(loads)
        await served.server.drain()
        for watch, statuses in zip(watches, ([NOT_SERVING], [NOT_SERVING], []), strict=True):
            for status in statuses:
                assert (await watch.read()).status == status
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await watch.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "shutting down" in str(caught.value.details())
        with pytest.raises(Draining):
            await anext(loads)


async def test_a_call_that_no_abort_can_reach_is_cancelled_and_cleaned_up() -> None:
    """It hangs in the engine's submit, where its id is not yet known."""
    engine = FakeEngine()
    engine.hold_submits = True
    engine.abort_hops = 50
    async with serving(engine, drain_seconds=0, abort_seconds=0.05) as served:
        call = asyncio.create_task(served.client.generate("x", request_id="stuck"))
        await engine.reached("submitting stuck")
        await served.server.drain()
        await engine.reached("aborted stuck")
        assert engine.aborts == ["stuck"], "by the call itself, which gRPC cancelled"
        with pytest.raises((UnknownStatus, asyncio.CancelledError)):
            await call


async def test_a_stop_overtakes_a_drain() -> None:
    """The second Ctrl-C."""
    engine = _pausing()
    async with serving(engine, drain_seconds=3600) as served:
        call = asyncio.create_task(served.client.generate("x", request_id="r"))
        await engine.reached("paused r")
        drain = asyncio.create_task(served.server.drain())
        await served.server.stop()
        with pytest.raises(Draining, match="shutting down; this request"):
            await call
        await drain
        await served.server.drain()


async def test_a_drain_ends_the_wait_for_termination() -> None:
    async with serving(FakeEngine()) as served:
        waiting = asyncio.create_task(served.server.wait_for_termination())
        await served.server.drain()
        await waiting
