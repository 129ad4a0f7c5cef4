"""Calls that send nothing but their name cost memory before their caller is known: they are bounded."""

from __future__ import annotations

import asyncio

from support.fake_engine import FakeEngine
from support.serving import serving

_HEADERS, _RST_STREAM, _SETTINGS = 1, 3, 4
_END_HEADERS, _ACK = 4, 1
_REFUSED_STREAM = (7).to_bytes(4, "big")


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """RFC 9113, section 4.1."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """RFC 7541, section 6.2.2: a header that is not indexed."""
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value


HEALTH_CHECK = b"\x83\x86" + b"".join(  # POST, http
    _literal(name, value)
    for name, value in (
        (b":path", b"/grpc.health.v1.Health/Check"),
        (b":authority", b"x"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    )
)


async def refused_streams(port: int, num_streams: int, num_refused: int) -> list[int]:
    """Open streams on one connection that send no message; those refused, once there are so many."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0) + _frame(_SETTINGS, _ACK, 0))
    for number in range(num_streams):
        writer.write(_frame(_HEADERS, _END_HEADERS, 1 + 2 * number, HEALTH_CHECK))
    refused: list[int] = []
    async with asyncio.timeout(60):
        while len(refused) < num_refused:
            header = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(header[:3], "big"))
            if header[3] == _RST_STREAM and payload == _REFUSED_STREAM:
                refused.append(int.from_bytes(header[5:9], "big"))
    writer.close()
    return refused


async def test_streams_beyond_the_bound_are_refused_and_other_connections_are_served() -> None:
    async with serving(FakeEngine(), max_streams_per_connection=8) as served:
        refused = await refused_streams(served.port, num_streams=40, num_refused=32)
        assert refused == [1 + 2 * number for number in range(8, 40)]
        assert (await served.client.generate("ok", max_tokens=2)).text == "ok"
