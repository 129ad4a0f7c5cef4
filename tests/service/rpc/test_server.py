"""The server as a process sees it: its port, its limits, what it lists, logs and counts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest
from support.fake_engine import PAUSE, FakeEngine, accepted, finished
from support.serving import new_server, serving

from pageturner.service.client import Client, Sampling
from pageturner.service.client.targets import CHANNEL_OPTIONS
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.engine.api import ModelInfo, ServerInfo
from pageturner.service.engine.metrics import Method
from pageturner.service.errors import ConfigError, InvalidArgument
from pageturner.service.rpc.options import ServerOptions
from pageturner.service.rpc.status import UnknownStatus
from pageturner.v1 import admin_pb2, generation_pb2, model_pb2


async def test_a_second_server_on_the_port_says_so() -> None:
    async with serving(FakeEngine()) as served:
        second = new_server(ServerOptions(port=served.port))
        with pytest.raises(ConfigError, match=f"127.0.0.1:{served.port} is in use") as caught:
            await second.start()
        assert caught.value.key == "server.port"
        assert (await served.client.generate("ok", max_tokens=2)).text == "ok", "the first is unharmed"
    third = new_server(ServerOptions(port=served.port))
    assert await third.start() == served.port, "free again"
    await third.stop()


async def test_an_address_of_another_machine_is_refused_with_the_reason() -> None:
    server = new_server(ServerOptions(host="192.0.2.1", port=0))
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0: "):
        await server.start()


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"port": 65536}, "server.port"),
        ({"port": -1}, "server.port"),
        ({"host": ""}, "server.host"),
        ({"max_request_bytes": 0}, "server.max_request_bytes"),
        ({"max_response_bytes": 1 << 31}, "server.max_response_bytes"),
        ({"keepalive_seconds": 0.0}, "server.keepalive_seconds"),
        ({"drain_seconds": float("nan")}, "server.drain_seconds"),
        ({"max_connection_age_seconds": 0.0}, "server.max_connection_age_seconds"),
        ({"max_streams_per_connection": 0}, "server.max_streams_per_connection"),
        ({"min_watch_seconds": 2.0, "max_watch_seconds": 1.0}, "server.min_watch_seconds"),
        ({"max_abort_ids": 0}, "server.max_abort_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_options_name_their_key(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerOptions(**options)
    assert caught.value.key == key


def test_an_ipv6_address_is_bracketed() -> None:
    assert ServerOptions(host="::1", port=5).public_address.text == "[::1]:5"
    assert ServerOptions(host="localhost", port=5).public_address.text == "localhost:5"


async def test_localai_1150_messages_may_pass_4_mib_and_the_limit_is_named() -> None:
    limit = 6 << 20
    async with serving(FakeEngine(), max_request_bytes=limit) as served:
        with pytest.raises(InvalidArgument, match="tenant: longer than"):  # hence it was read
            await served.client.generate("x", tenant="t" * (5 << 20))
        with pytest.raises(UnknownStatus, match=str(limit)) as caught:
            await served.client.tokenize("x" * (limit + 1))
        assert caught.value.code == "RESOURCE_EXHAUSTED"
        assert (await served.client.generate("ok", max_tokens=2)).text == "ok"


async def test_an_answer_over_its_limit_names_it_too() -> None:
    async with serving(FakeEngine(), max_response_bytes=1 << 16) as served:
        with pytest.raises(UnknownStatus, match=str(1 << 16)) as caught:
            await served.client.detokenize([97] * (1 << 17))
        assert caught.value.code == "RESOURCE_EXHAUSTED"


def test_sglang_19986_our_clients_ping_more_seldom_than_our_servers_allow() -> None:
    arguments = dict(ServerOptions().channel_arguments())
    allowed = arguments["grpc.http2.min_ping_interval_without_data_ms"]
    assert allowed == 10_000
    assert dict(CHANNEL_OPTIONS)["grpc.keepalive_time_ms"] > allowed
    assert arguments["grpc.keepalive_permit_without_calls"] == 1
    assert arguments["grpc.so_reuseport"] == 0


@pytest.mark.parametrize(("bound", "allowed"), [(0.001, True), (10.0, False)], ids=["allowed", "too_many"])
async def test_sglang_19986_pings_within_the_bound_are_answered(bound: float, allowed: bool) -> None:
    """A client that only pings, every 5 ms. gRPC tolerates a few pings too early, then says goodbye."""
    async with serving(FakeEngine(), min_ping_interval_seconds=bound) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, b""))
        answered = 0
        while answered < 8:
            writer.write(_frame(_PING, b"%08d" % answered))
            if not await _is_answered(reader):
                break
            answered += 1
            await asyncio.sleep(0.005)
        writer.close()
    assert (answered == 8) == allowed


@pytest.mark.fault("R")
def test_idle_connections_are_closed_after_minutes_by_default() -> None:
    arguments = dict(ServerOptions().channel_arguments())
    assert arguments["grpc.max_connection_idle_ms"] == 300_000
    # Above 1,000 calls that wait to be begun, gRPC's default, it cancels some of those that come.
    assert arguments["grpc.server.max_pending_requests"] >= 10_000
    assert arguments["grpc.server.max_pending_requests_hard_limit"] >= 10_000
    assert arguments["grpc.server_handshake_timeout_ms"] == 20_000


@pytest.mark.fault("R")
@pytest.mark.parametrize("preface", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], ids=["silent", "no_call"])
async def test_a_connection_without_a_call_is_closed(preface: bytes) -> None:
    """Its descriptor is free for another client. A call in progress keeps its connection."""
    engine = FakeEngine(lambda request, ids: [accepted(request, ids), PAUSE, finished(request, len(ids), 0)])
    async with serving(engine, max_connection_idle_seconds=0.2, handshake_timeout_seconds=0.2) as served:
        call = asyncio.create_task(served.client.generate("x", request_id="r"))
        await engine.reached("paused r")
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(preface and preface + _frame(_SETTINGS, b""))
        async with asyncio.timeout(60):
            while await reader.read(1 << 16):
                pass
        writer.close()
        engine.resume("r")
        assert (await call).request_id == "r"


_SETTINGS, _PING, _GOAWAY = 4, 6, 7


def _frame(kind: int, payload: bytes) -> bytes:
    """RFC 9113, section 4.1: length, type, flags, stream 0."""
    return len(payload).to_bytes(3, "big") + bytes((kind, 0, 0, 0, 0, 0)) + payload


async def _is_answered(reader: asyncio.StreamReader) -> bool:
    """Whether the next frame about pings is an answer to one, not the end."""
    while True:
        header = await reader.readexactly(9)
        payload = await reader.readexactly(int.from_bytes(header[:3], "big"))
        if header[3] == _PING and header[4] & 1:
            return True
        if header[3] == _GOAWAY:
            assert payload.endswith(b"too_many_pings")
            return False


async def test_each_call_is_counted_by_method_and_code() -> None:
    engine = FakeEngine(lambda s, t: [accepted(s, t), RuntimeError("oops")])
    async with serving(engine) as served:
        await served.client.load()
        for _ in range(2):
            with pytest.raises(InvalidArgument):
                await served.client.generate("")
        with pytest.raises(UnknownStatus):
            _ = [item async for item in served.client.stream("x")]
        metrics = served.metrics.snapshot()
    load = Method("unary", "pageturner.v1.AdminService", "GetLoad")
    generate = Method("unary", "pageturner.v1.GenerationService", "Generate")
    stream = Method("server_stream", "pageturner.v1.GenerationService", "GenerateStream")
    assert metrics.grpc_server_started_total == {load: 1, generate: 2, stream: 1}
    assert metrics.grpc_server_handled_total == {
        (load, "OK"): 1,
        (generate, "INVALID_ARGUMENT"): 2,
        (stream, "INTERNAL"): 1,
    }


async def test_the_access_log_tells_who_what_and_how_long_and_no_prompt() -> None:
    async with serving(FakeEngine()) as served:
        await served.client.generate("my private words", request_id="r1", stop=["w"])
        with pytest.raises(InvalidArgument):
            await served.client.generate("my private words", request_id="r2", top_p=3.0)
    # After the server's end: a call's line is written once its client has the status.
    entries = [entry for entry in served.log.entries if entry["event"] == "rpc"]
    assert [(entry["request_id"], entry["code"]) for entry in entries] == [
        ("r1", "OK"),
        ("r2", "INVALID_ARGUMENT"),
    ]
    for entry in entries:
        assert (entry["service"], entry["method"]) == ("pageturner.v1.GenerationService", "Generate")
        assert entry["peer"].startswith("ipv4:127.0.0.1")
        assert entry["seconds"] >= 0
    assert "private" not in repr(served.log.entries)


@pytest.mark.fault("K")
async def test_calls_that_programs_make_all_the_time_are_logged_at_debug() -> None:
    """Token counts, of which a load test makes one a request, and what `pageturner top` asks each second."""
    async with serving(FakeEngine()) as served:
        await served.client.detokenize([1, 2])
        await served.client.load()
        await served.client.models()
        levels = {entry["method"]: entry["log_level"] for entry in served.log.entries if "method" in entry}
    assert levels == {"Detokenize": "debug", "GetLoad": "debug", "ListModels": "info"}


async def test_prompts_are_logged_only_when_asked_for() -> None:
    async with serving(FakeEngine(), log_prompts=True) as served:
        await served.client.generate("my private words")
    assert "my private words" in repr(served.log.entries)


async def test_request_ids_of_other_calls_do_not_stick_to_a_log_line() -> None:
    async with serving(FakeEngine()) as served:
        await served.client.generate("x", request_id="r1")
        await served.client.load()
        [entry] = [entry for entry in served.log.entries if entry.get("method") == "GetLoad"]
    assert "request_id" not in entry


async def test_admin_and_model_facts_arrive_as_the_engine_states_them() -> None:
    engine = FakeEngine()
    figures: dict[str, Any] = {f.name: i for i, f in enumerate(fields(SchedulerStats), 1) if f.compare}
    engine.stats = SchedulerStats(**figures)
    async with serving(engine) as served:
        client = served.client
        assert await client.models() == engine.models()
        assert await client.model() == await client.model("echo") == engine.models()[0]
        assert await client.server_info() == engine.server_info()
        assert await client.policies() == engine.policies()
        assert await client.load() == engine.stats


async def test_watch_load_follows_the_load() -> None:
    engine = FakeEngine()
    async with serving(engine, min_watch_seconds=0.001) as served:
        loads = served.client.watch_load(0.001)
        for num_running in range(3):
            engine.stats = SchedulerStats(num_running=num_running)
            async for stats in loads:
                if stats.num_running == num_running:
                    break
            else:
                raise AssertionError("the watch ended")
        await loads.aclose()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (SamplingParams, generation_pb2.SamplingParams),
        (ServerInfo, admin_pb2.GetServerInfoResponse),
        (ModelInfo, model_pb2.Model),
    ],
    ids=lambda kind: kind.__name__,
)
def test_values_that_cross_by_name_have_the_same_names_on_both_sides(kind: Any, message: Any) -> None:
    assert {field.name for field in fields(kind) if field.compare} == set(message.DESCRIPTOR.fields_by_name)


def test_load_has_all_figures_of_the_scheduler_and_more() -> None:
    figures = {field.name for field in fields(SchedulerStats) if field.compare}
    assert figures < set(admin_pb2.Load.DESCRIPTOR.fields_by_name)


def test_the_python_clients_keywords_are_the_wires_fields() -> None:
    assert set(Sampling.__annotations__) == set(generation_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


def test_the_client_brings_nothing_heavy() -> None:
    code = (
        "import sys, pageturner.service.client\n"
        "heavy = {'torch', 'numpy', 'transformers', 'cupy', 'jinja2', 'tokenizers', 'structlog'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_a_server_that_cannot_be_reached_is_a_typed_error_too() -> None:
    async with serving(FakeEngine()) as served:
        pass
    async with Client(f"127.0.0.1:{served.port}") as client:
        with pytest.raises(UnknownStatus) as caught:
            await client.generate("x")
        assert caught.value.code == "UNAVAILABLE"
