"""Calls of methods that are not there, by names of any bytes: UNIMPLEMENTED, and the server goes on."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from support import http2
from support.fake_engine import FakeEngine
from support.serving import serving

from pageturner.service.rpc import grpc_server

NOT_UTF8 = (b"/\xff\xfe/x", b"/a/\x80", b"\xc3", b"/pageturner.v1.GenerationService/Generate\xff")


async def status_of(port: int, path: bytes) -> bytes:
    """The trailers of a call on a connection of its own, as they are on the wire."""
    connection = await http2.Connection.open(f"127.0.0.1:{port}")
    headers = [(b":path", path) if name == b":path" else (name, value) for name, value in HEADERS]
    opening = http2.frame(http2.Kind.HEADERS, http2.END_HEADERS, 1, http2.header_block(headers))
    await connection.hello()
    await connection.send(opening, http2.data(1, http2.message(b"")))
    try:
        while (found := await connection.next_frame())[0] != http2.Kind.HEADERS:
            pass
    finally:
        connection.close()
    return found[3]


HEADERS = http2.call_headers("")


@pytest.mark.fault("T")
@pytest.mark.parametrize("path", [*NOT_UTF8, b"/a/b", b"nothing"])
async def test_a_name_of_any_bytes_is_answered_and_ends_nothing(path: bytes) -> None:
    async with serving(FakeEngine()) as served:
        for _ in range(3):
            assert b"Method not found" in await asyncio.wait_for(status_of(served.port, path), 30)
        assert (await served.client.generate("x", max_tokens=1)).choices[0].text


async def test_unknown_methods_are_answered_while_known_ones_are() -> None:
    async with serving(FakeEngine()) as served:

        async def unknown(number: int) -> grpc.StatusCode:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = served.channel.unary_unary(
                f"/pageturner.v1.GenerationService/No{number}"
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"")
            return caught.value.code()

        known = [served.client.generate("x", max_tokens=1) for _ in range(20)]
        codes = await asyncio.gather(*map(unknown, range(20)))
        assert set(codes) == {grpc.StatusCode.UNIMPLEMENTED}
        answers = await asyncio.gather(*known)
        assert all(answer.choices[0].text for answer in answers)


@pytest.mark.skipif(not grpc_server.IS_GUARDED, reason="this grpcio decodes names in the call's own task")
async def test_grpcio_itself_still_needs_the_guard() -> None:
    """When this fails, `service/rpc/grpc_server.py` can go."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    connection = await http2.Connection.open(f"127.0.0.1:{port}")
    headers = [(b":path", NOT_UTF8[0]) if name == b":path" else (name, value) for name, value in HEADERS]
    await connection.hello()
    await connection.send(http2.frame(http2.Kind.HEADERS, http2.END_HEADERS, 1, http2.header_block(headers)))
    assert await connection.until([http2.Kind.GOAWAY], 30), "the server shuts down"
    connection.close()
    with pytest.raises(UnicodeDecodeError):
        await server.wait_for_termination(30)
