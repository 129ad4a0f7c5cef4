"""Health and the end of a server: what runs may finish, what waits is refused, nothing is left open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.fake_engine import PAUSE, FakeEngine, Step, accepted, echo, finished
from support.http_pages import get
from support.real_service import real_service
from support.scrapes import monitoring
from support.serving import Served, serving

from pageturner.service.client import Client
from pageturner.service.client.failures import is_away
from pageturner.service.engine.api import DrainOutcome, EngineHealth, GenerationRequest
from pageturner.service.engine.metrics import Method
from pageturner.service.errors import Draining, InvalidArgument, Loading, PageturnerError
from pageturner.service.rpc.server import OWN_SERVICES
from pageturner.service.rpc.status import UnknownStatus
from pageturner.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def _pausing() -> FakeEngine:
    return FakeEngine(lambda s, t: [accepted(s, t), PAUSE, finished(s, len(t), 0)])


def _pausing_streams() -> FakeEngine:
    """Requests whose id begins with s wait, the others are answered."""

    def script(request: GenerationRequest, token_ids: tuple[int, ...]) -> Sequence[Step]:
        if not request.request_id.startswith("s"):
            return echo(request, token_ids)
        return [accepted(request, token_ids), PAUSE, finished(request, len(token_ids), 0)]

    return FakeEngine(script)


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


async def test_liveness_ends_with_the_engine_alone() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        for health in EngineHealth:
            engine.set_health(health)
            expected = NOT_SERVING if health is EngineHealth.DEAD else SERVING
            assert await _check(served, "liveness") == expected, health
    async with serving(None) as loading:
        assert await _check(loading, "liveness") == SERVING


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
    engine = _pausing_streams()
    async with serving(engine, drain_seconds=60) as served:
        watch = _watch(served)
        assert (await watch.read()).status == SERVING
        running = asyncio.create_task(served.client.generate("x", request_id="s-old"))
        await engine.reached("paused s-old")
        drain = asyncio.create_task(served.server.drain())
        assert (await watch.read()).status == NOT_SERVING
        refusal: PageturnerError | None = None
        while refusal is None:  # what is on its way is still answered, then nobody listens any more
            try:
                await served.client.generate("y")
            except PageturnerError as error:
                refusal = error
        assert is_away(refusal)
        assert not drain.done()
        engine.resume("s-old")
        assert (await running).request_id == "s-old"
        await drain
    assert engine.aborts == []


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

        async def drain_and_go_on(grace_seconds: float) -> DrainOutcome:
            outcome = await drain(grace_seconds)
            service.release_steps()
            return outcome

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


def _balanced(*ports: int) -> grpc.aio.Channel:
    """A channel that takes servers in turns, as clients of a headless service do."""
    config = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
    return grpc.aio.insecure_channel(f"ipv4:{addresses}", options=(("grpc.service_config", config),))


async def test_clients_of_a_balanced_channel_leave_at_once_and_streams_go_on() -> None:
    """GOAWAY: no call fails, none goes to the server that drains, and what runs there finishes."""
    leaving, staying = _pausing_streams(), FakeEngine()
    async with (
        serving(leaving, drain_seconds=3600) as first,
        serving(staying) as second,
        _balanced(first.port, second.port) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        streams: list[Any] = []
        while not leaving.live:  # the first server's turn
            name = f"s{len(streams)}"
            prompt = generation_pb2.Prompt(text="x")
            request = generation_pb2.GenerateStreamRequest(request_id=name, prompt=prompt)
            streams.append(stub.GenerateStream(request))
            await streams[-1].read()
        (name,) = leaving.live
        drain = asyncio.create_task(first.server.drain())
        await leaving.reached(f"paused {name}")
        call = generation_pb2.GenerateRequest(prompt=generation_pb2.Prompt(text="y"))
        for _ in range(50):
            await stub.Generate(call)
        num_before = len(staying.requests)
        for _ in range(50):
            await stub.Generate(call)
        assert len(staying.requests) == num_before + 50
        assert not drain.done()
        leaving.resume(name)
        rest: list[Any] = [await streams[-1].read()]
        while rest[-1] is not grpc.aio.EOF:
            rest.append(await streams[-1].read())
        assert [message.WhichOneof("event") for message in rest[:-1]] == ["finished"]
        assert await drain == DrainOutcome(num_finished=1)


async def test_no_call_of_the_python_client_is_lost_to_a_server_that_drains() -> None:
    """Also of those that gRPC has taken and ends with CANCELLED, since no handler was given them yet."""
    leaving, staying = FakeEngine(), FakeEngine()
    async with (
        serving(leaving, drain_seconds=60) as first,
        serving(staying) as second,
        Client([f"127.0.0.1:{first.port}", f"127.0.0.1:{second.port}"]) as client,
    ):
        is_drained = asyncio.Event()

        async def ask_on() -> None:
            while not is_drained.is_set():
                assert (await client.generate("ok", max_tokens=2)).text == "ok"

        asking = [asyncio.create_task(ask_on()) for _ in range(16)]
        await client.generate("first")
        await first.server.drain()
        await client.generate("last")
        is_drained.set()
        await asyncio.gather(*asking)
    assert leaving.requests
    assert staying.requests


async def test_a_drain_by_rpc_waits_for_what_runs_and_counts_it() -> None:
    engine = _pausing()
    async with serving(engine, drain_seconds=3600) as served:
        watch = _watch(served)
        assert (await watch.read()).status == SERVING
        running = asyncio.create_task(served.client.generate("x", request_id="r"))
        await engine.reached("paused r")
        drain = asyncio.create_task(served.client.drain())
        assert (await watch.read()).status == NOT_SERVING
        assert not drain.done()
        engine.resume("r")
        assert (await running).request_id == "r"
        assert await drain == DrainOutcome(num_finished=1, num_aborted=0)
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
            await watch.read()
        await served.server.wait_for_termination()
        await served.server.drain()  # SIGTERM, later


async def test_a_drain_by_rpc_ends_what_outlasts_its_grace() -> None:
    engine = _pausing()
    async with serving(engine, drain_seconds=3600) as served:
        calls = [asyncio.create_task(served.client.generate("x", request_id=f"r{i}")) for i in range(3)]
        for i in range(3):
            await engine.reached(f"paused r{i}")
        assert await served.client.drain(0.0) == DrainOutcome(num_finished=0, num_aborted=3)
        for call in calls:
            with pytest.raises(Draining, match="shutting down; this request"):
                await call


async def test_a_caller_that_leaves_does_not_end_the_drain() -> None:
    engine = _pausing()
    async with serving(engine, drain_seconds=3600) as served:
        watch = _watch(served)
        assert (await watch.read()).status == SERVING
        running = asyncio.create_task(served.client.generate("x", request_id="r"))
        await engine.reached("paused r")
        drain = asyncio.create_task(served.client.drain())
        assert (await watch.read()).status == NOT_SERVING
        drain.cancel()
        engine.resume("r")
        assert (await running).request_id == "r"
        await served.server.wait_for_termination()


@pytest.mark.parametrize("grace", [-1.0, float("nan"), 86400.0])
async def test_a_grace_out_of_its_bounds_is_refused_and_drains_nothing(grace: float) -> None:
    async with serving(FakeEngine()) as served:
        with pytest.raises(InvalidArgument, match="grace_seconds"):
            await served.client.drain(grace)
        assert (await served.client.generate("ok", max_tokens=2)).text == "ok"


async def test_health_says_so_before_the_engine_refuses() -> None:
    """Both ports', at once; and the reason with it."""
    engine = FakeEngine()
    async with serving(engine, drain_seconds=60) as served, monitoring(served.server, served.metrics) as port:
        watch = _watch(served)
        assert (await watch.read()).status == SERVING
        drain = asyncio.create_task(served.server.drain())
        assert (await watch.read()).status == NOT_SERVING
        assert engine.health.value == "serving"
        ready = await get(port.port, "/readyz")
        assert (ready.status, ready.body) == (
            503,
            "draining: the server is shutting down and takes no new requests\n",
        )
        assert (await get(port.port, "/healthz")).status == 200
        await drain
        assert engine.health.value == "draining"


async def test_there_is_nothing_to_drain_while_the_model_loads() -> None:
    async with serving(None) as served:
        with pytest.raises(Loading):
            await served.client.drain()


async def test_an_admin_port_shows_the_drained_server_until_its_end(tmp_path: Path) -> None:
    target = f"unix:{tmp_path / 'admin'}"
    async with (
        serving(FakeEngine(), admin_host=target) as served,
        Client(target) as admin,
        grpc.aio.insecure_channel(target) as channel,
    ):
        loads = admin.watch_load(3600)
        await anext(loads)
        assert await admin.drain() == DrainOutcome()
        load = (await admin_pb2_grpc.AdminServiceStub(channel).GetLoad(admin_pb2.GetLoadRequest())).load
        assert (load.is_draining, load.is_ready) == (True, False)
        with pytest.raises((Draining, UnknownStatus)):
            await served.client.generate("x")
        waiting = asyncio.create_task(anext(loads))
        await admin.load()  # a whole call in which the watch could have ended
        assert not waiting.done()
        await served.server.stop()
        with pytest.raises(Draining, match="shutting down"):
            await waiting
