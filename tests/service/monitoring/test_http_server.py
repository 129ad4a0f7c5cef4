"""The monitoring port takes small requests from few clients, and lets none of them hold anything for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from support.http_pages import ask, get
from support.patience import until
from support.serving import capturing_logger

from pageturner.service.errors import ConfigError
from pageturner.service.monitoring.host_names import HostNames
from pageturner.service.monitoring.http_server import MAX_REQUEST_BYTES, HttpServer, HttpTimes
from pageturner.service.monitoring.routes import HttpRequest, HttpResponse, Router

LONG = HttpTimes(60.0, 60.0, 60.0)


async def _echo(request: HttpRequest) -> HttpResponse:
    return HttpResponse.of_text(f"{request.path} {dict(request.query)}")


async def _fail(request: HttpRequest) -> HttpResponse:
    raise RuntimeError("the secret cause")


async def _large(request: HttpRequest) -> HttpResponse:
    return HttpResponse(b"x" * (64 << 20))


@asynccontextmanager
async def _serving(
    times: HttpTimes = LONG, max_connections: int = 8
) -> AsyncIterator[tuple[int, HttpServer]]:
    router = Router()
    router.add("/echo", _echo)
    router.add("/fail", _fail)
    router.add("/large", _large)
    server = HttpServer(router, capturing_logger()[0], max_connections=max_connections, times=times)
    port = await server.start("127.0.0.1", 0)
    try:
        yield port, server
    finally:
        await server.aclose()


async def test_a_page_its_query_and_its_headers() -> None:
    async with _serving() as (port, _):
        page = await get(port, "/echo?a=1&b=two%20words&a=3")
        assert (page.status, page.body) == (200, "/echo {'a': '3', 'b': 'two words'}\n")
        assert page.headers["content-length"] == str(len(page.body))
        assert page.headers["cache-control"] == "no-store"
        assert page.headers["x-content-type-options"] == "nosniff"


async def test_a_head_has_no_body_and_nothing_but_reading_is_done() -> None:
    async with _serving() as (port, _):
        head = await get(port, "/echo", method="HEAD")
        assert (head.status, head.body) == (200, "")
        assert head.headers["content-length"] == str(len("/echo {}\n"))
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            page = await get(port, "/echo", method=method)
            assert page.status == 405
            assert page.headers["allow"] == "GET, HEAD"


async def test_an_unknown_path_tells_those_that_there_are() -> None:
    async with _serving() as (port, _):
        page = await get(port, "/nothing")
        assert page.status == 404
        assert "/echo /fail /large" in page.body


async def test_a_handler_that_fails_tells_nothing_of_why() -> None:
    async with _serving() as (port, _):
        page = await get(port, "/fail")
        assert page.status == 500
        assert "secret" not in page.body


async def test_a_connection_is_used_again() -> None:
    async with _serving() as (port, server):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(b"GET /echo HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await reader.readuntil(b"{}\n")).startswith(b"HTTP/1.1 200")
        assert server.num_connections == 1
        writer.close()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /" + b"a" * MAX_REQUEST_BYTES, 431),
        (b"GET /echo HTTP/1.1\r\nhost: x\r\nlong: " + b"a" * MAX_REQUEST_BYTES, 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 405),
        (b"GET /echo HTTP/1.1\r\n\r\n", 400),
        (b"GET /echo HTTP/1.1\r\nhost: localhost\r\nhost: other\r\n\r\n", 400),
    ],
    ids=["line", "headers", "tls", "http2", "no-host", "two-hosts"],
)
async def test_what_is_no_small_request_is_refused(data: bytes, status: int) -> None:
    async with _serving() as (port, _):
        answer = await ask(port, data)
        assert int(answer.split()[1]) == status
        assert (await get(port, "/echo")).status == 200


async def test_a_body_is_not_read() -> None:
    async with _serving() as (port, _):
        head = b"GET /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n"
        answer = await ask(port, head + b"x" * 100)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer.lower()


async def test_one_too_many_takes_the_place_of_the_connection_that_waited_longest() -> None:
    async with _serving(max_connections=2) as (port, server):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for reader, writer in held:
            writer.write(b"GET /echo HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await reader.readuntil(b"{}\n")
        assert (await get(port, "/echo")).status == 200
        with suppress(ConnectionError):
            assert await held[0][0].read() == b""
        reader, writer = held[1]
        writer.write(b"GET /echo HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await reader.readuntil(b"{}\n")).startswith(b"HTTP/1.1 200")
        for _, writer in held:
            writer.close()
        await until(lambda: not server.num_connections)


async def test_connections_over_the_bound_are_closed_where_all_are_at_work() -> None:
    async with _serving(max_connections=2) as (port, _):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for reader, writer in held:
            writer.write(b"GET /large HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await reader.readexactly(100)  # of more than the system takes in at once
        with pytest.raises((ConnectionError, IndexError, asyncio.IncompleteReadError)):
            await get(port, "/echo")
        for _, writer in held:
            writer.transport.abort()


@pytest.mark.parametrize("said", [b"", b"GET /echo HTT"])
async def test_a_client_that_says_too_little_is_hung_up_on(said: bytes) -> None:
    async with _serving(HttpTimes(read=60.0, first_read=0.05, write=60.0)) as (port, _):
        with suppress(ConnectionResetError):
            assert await ask(port, said) == b""


async def test_a_client_that_does_not_read_is_hung_up_on() -> None:
    async with _serving(HttpTimes(read=60.0, first_read=60.0, write=0.05)) as (port, server):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        reader._transport.pause_reading()  # type: ignore[attr-defined]  # the reader would buffer it
        writer.write(b"GET /large HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await writer.drain()
        await until(lambda: server.num_connections == 1)
        await until(lambda: server.num_connections == 0)
        writer.transport.abort()


@pytest.mark.parametrize("host", ["rebound.example:9464", "evil.example", "localhost.evil.example"])
async def test_a_page_of_another_site_cannot_read_through_a_name_of_its_own(host: str) -> None:
    async with _serving() as (port, _):
        assert (await get(port, "/echo", host=host)).status == 421


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1:1", "[::1]:1", "[::1]", "10.0.0.1"])
async def test_addresses_and_localhost_are_own_names(host: str) -> None:
    async with _serving() as (port, _):
        assert (await get(port, "/echo", host=host)).status == 200


@pytest.mark.parametrize(
    ("host", "is_right"),
    [
        ("10.1.2.3:9464", True),
        ("localhost", True),
        ("pageturner:9464", True),
        ("pod.default.svc.cluster.local:9464", True),
        ("metrics.example.com", True),
        ("Metrics.Example.com.:9464", True),
        ("here.example.org", True),
        ("rebound.example:9464", False),
        ("local.evil.example", False),
        ("evil.example.com", False),
    ],
)
def test_off_the_loopback_address_names_that_strangers_can_have_are_not_ours(
    host: str, is_right: bool
) -> None:
    names = HostNames.of("here.example.org", ("metrics.example.com", ""))
    assert names.is_right(host, is_local=False) is is_right


async def test_a_port_that_others_reach_asks_for_its_name_too() -> None:
    router = Router()
    router.add("/echo", _echo)
    server = HttpServer(router, capturing_logger()[0], names=("mine.example",))
    port = await server.start("0.0.0.0", 0)
    try:
        assert (await get(port, "/echo", host="mine.example")).status == 200
        refused = await get(port, "/echo", host="evil.example")
        assert refused.status == 421
        assert "metrics.names" in refused.body
    finally:
        await server.aclose()


async def test_a_port_that_is_taken_is_told() -> None:
    async with _serving() as (port, _):
        other = HttpServer(Router(), capturing_logger()[0])
        with pytest.raises(ConfigError, match=f"metrics.port: 127.0.0.1:{port} is in use"):
            await other.start("127.0.0.1", port)
