"""The spellings of a target; a channel goes straight to this machine, and is soon back after an outage."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.fake_engine import FakeEngine
from support.ports import reserved_port
from support.serving import new_server, serving

from pageturner.loadtest.channel import channel_options as loadtest_options
from pageturner.service.client import NEVER, Client, SyncClient
from pageturner.service.client.targets import CHANNEL_OPTIONS, PROXY_VARIABLES, parse_target
from pageturner.service.core.clock import ManualClock
from pageturner.service.engine.api import EngineHealth
from pageturner.service.errors import DeadlineExceeded, InvalidArgument
from pageturner.service.rpc.options import ServerOptions
from pageturner.service.rpc.status import UnknownStatus

LOCAL = {
    "localhost:50051": "localhost:50051",
    "LOCALHOST:1": "LOCALHOST:1",
    "localhost": "localhost:50051",
    "127.0.0.1:50051": "127.0.0.1:50051",
    "127.1.2.3": "127.1.2.3:50051",
    "[::1]:50051": "[::1]:50051",
    "[::1]": "[::1]:50051",
    "::1": "[::1]:50051",
    "ipv4:127.0.0.1:50051": "ipv4:127.0.0.1:50051",
    "ipv4:127.0.0.1": "ipv4:127.0.0.1:50051",
    "ipv6:[::1]:50051": "ipv6:[::1]:50051",
    "dns:localhost:50051": "dns:localhost:50051",
    "dns:///localhost:50051": "dns:///localhost:50051",
    "dns:///localhost": "dns:///localhost:50051",
    "unix:pt.sock": "unix:pt.sock",
    "unix:/tmp/pt.sock": "unix:/tmp/pt.sock",
    "unix:///tmp/pt.sock": "unix:///tmp/pt.sock",
    "unix-abstract:pt": "unix-abstract:pt",
}
ELSEWHERE = {
    "example.org:443": "example.org:443",
    "gpu-7": "gpu-7:50051",
    "10.0.0.7:50051": "10.0.0.7:50051",
    "[2001:db8::7]:50051": "[2001:db8::7]:50051",
    "2001:db8::7": "[2001:db8::7]:50051",
    "dns:///example.org:50051": "dns:///example.org:50051",
    "dns://10.0.0.1/example.org": "dns://10.0.0.1/example.org:50051",
    "ipv4:10.0.0.7:1,10.0.0.8:1": "ipv4:10.0.0.7:1,10.0.0.8:1",
    "xds:///service": "xds:///service",
}
REFUSED = {
    "": "write HOST:PORT",
    " localhost:50051": "write HOST:PORT",
    ":50051": "write HOST:PORT",
    "localhost:": "'' is not a port",
    "localhost:http": "'http' is not a port",
    "localhost:0": "'0' is not a port",
    "localhost:65536": "'65536' is not a port",
    "localhost:-1": "'-1' is not a port",
    "localhost:\N{ARABIC-INDIC DIGIT ONE}": "is not a port",
    "[localhost]:50051": "an IPv6 address in brackets",
    "a:b:c": "'b:c' is not a port",
    "http://localhost:50051": "no URLs",
    "localhost:50051/": "a socket file is unix:PATH",
    "/tmp/pt.sock": "a socket file is unix:PATH",
    "unix://pt.sock": "this one is unix:pt.sock",
    "unix:": "write unix:PATH",
    "unix:" + "x" * 108: "at most 107 bytes",
}


@pytest.mark.fault("36")
@pytest.mark.parametrize(("text", "address"), (LOCAL | ELSEWHERE).items())
def test_a_target_gets_the_default_port_where_it_has_none(text: str, address: str) -> None:
    assert parse_target(text).address == address


@pytest.mark.fault("36")
@pytest.mark.parametrize(("text", "reason"), REFUSED.items())
def test_an_invalid_target_is_refused_in_one_line_that_says_what_to_write(text: str, reason: str) -> None:
    for make in (Client, SyncClient):
        with pytest.raises(InvalidArgument) as caught:
            make(text)
        assert caught.value.field == "target"
        assert reason in caught.value.reason
        assert "\n" not in str(caught.value)


@pytest.mark.fault("8")
@pytest.mark.parametrize("text", [*LOCAL, *ELSEWHERE])
def test_only_targets_of_this_machine_are_reached_past_any_proxy(text: str) -> None:
    is_direct = ("grpc.enable_http_proxy", 0) in parse_target(text).channel_options()
    assert is_direct == (text in LOCAL)
    assert (("grpc.enable_http_proxy", 0) in loadtest_options(text)) == is_direct


@pytest.mark.fault("8")
@pytest.mark.parametrize("variable", PROXY_VARIABLES)
async def test_a_local_server_is_reached_with_any_proxy_set(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    async with serving(FakeEngine()) as served:
        for target in (f"127.0.0.1:{served.port}", f"localhost:{served.port}"):
            async with Client(target) as client:
                assert (await client.generate("ab", max_tokens=2)).text == "ab"
            with SyncClient(target) as sync_client:
                answer = await asyncio.to_thread(sync_client.generate, "ab", max_tokens=2)
                assert answer.text == "ab"


@pytest.mark.fault("8")
async def test_the_error_of_a_server_elsewhere_names_the_proxy_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://user:secret@127.0.0.1:9")
    async with Client("gpu-7.invalid:1", retry=NEVER) as client:
        with pytest.raises(UnknownStatus, match=r"http_proxy is set.* names gpu-7\.invalid") as caught:
            await client.generate("x")
        assert caught.value.code == "UNAVAILABLE"
        assert "secret" not in str(caught.value)
        with pytest.raises(DeadlineExceeded, match=r"no server at gpu-7\.invalid:1 .* \(http_proxy is set"):
            await client.wait_until_serving(0.01)


@pytest.mark.fault("36")
async def test_a_unix_socket_is_reached_by_a_relative_and_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server = new_server(ServerOptions(host="unix:pt.sock"), FakeEngine())
    await server.start()
    try:
        for target in ("unix:pt.sock", f"unix:{tmp_path}/pt.sock", f"unix://{tmp_path}/pt.sock"):
            async with Client(target) as client:
                await client.wait_until_serving(60)
                assert (await client.generate("ab", max_tokens=2)).text == "ab"
            with SyncClient(target) as sync_client:
                assert (await asyncio.to_thread(sync_client.generate, "ab", max_tokens=2)).text == "ab"
    finally:
        await server.stop()


@pytest.mark.fault("38")
def test_a_channel_tries_again_within_two_seconds() -> None:
    """gRPC's own bounds are 120 s between tries and 20 s for one try that nothing answers.

    A try of 5 s sends its SYN at 0, 1 and 3 s.
    """
    options = dict(CHANNEL_OPTIONS)
    jitter = 1.2
    assert options["grpc.initial_reconnect_backoff_ms"] <= options["grpc.max_reconnect_backoff_ms"]
    assert options["grpc.max_reconnect_backoff_ms"] * jitter < 2_000
    assert options["grpc.min_reconnect_backoff_ms"] <= 5_000


@pytest.mark.fault("38")
async def test_a_client_that_waits_meets_a_server_that_starts_later() -> None:
    with reserved_port() as port:
        await check_that_it_waits(port)


async def check_that_it_waits(port: int) -> None:
    async with Client(f"127.0.0.1:{port}", retry=NEVER) as client:
        waiting = asyncio.create_task(client.wait_until_serving(60))
        with pytest.raises(UnknownStatus):
            await client.generate("x")  # by then the channel has failed once, and waits for its next try
        server = new_server(ServerOptions(port=port), FakeEngine())
        await server.start()
        try:
            await waiting
            assert (await client.generate("ab", max_tokens=2)).text == "ab"
        finally:
            await server.stop()


@pytest.mark.fault("38")
async def test_a_client_that_waits_outlasts_a_server_that_goes_away() -> None:
    """As one that is restarted: the first ends the watch before it was ever ready."""
    with reserved_port() as port:
        await check_that_it_outlasts_a_server(port)


async def check_that_it_outlasts_a_server(port: int) -> None:
    engine = FakeEngine()
    first = new_server(ServerOptions(port=port), engine)
    await first.start()
    async with Client(f"127.0.0.1:{port}") as client:
        await client.wait_until_serving(60)
        engine.set_health(EngineHealth.DRAINING)
        waiting = asyncio.create_task(client.wait_until_serving(60))
        assert await client.load() is not None
        await first.stop()
        second = new_server(ServerOptions(port=port), FakeEngine())
        await second.start()
        try:
            await waiting
        finally:
            await second.stop()


@pytest.mark.fault("38")
def test_each_look_at_the_health_gets_what_is_left_of_the_time() -> None:
    """On a clock that only sleeping moves: gRPC's own limit ends the look at a server that is not there."""
    clock = ManualClock()
    client = SyncClient("unix:nowhere.sock", clock=clock, sleep=clock.advance)
    with pytest.raises(DeadlineExceeded, match=r"no server at unix:nowhere\.sock was ready within 0\.05 s"):
        client.wait_until_serving(0.05)


def test_the_proxy_variable_is_the_first_that_grpc_reads() -> None:
    target = parse_target("gpu-7:1")
    assert target.proxy_variable({"http_proxy": "x"}) == "http_proxy"
    assert target.proxy_variable({"http_proxy": "x", "grpc_proxy": "y"}) == "grpc_proxy"
    assert target.proxy_variable({"http_proxy": ""}) == target.proxy_variable({}) == ""
    assert parse_target("localhost").proxy_variable({"http_proxy": "x"}) == ""
