"""Frames that break HTTP/2, or keep to it and mean harm: each on a connection of its own.

The server may hang up, reset the stream or answer with an error. It must go on serving its other clients, and
keep nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from random import Random

from support import http2
from support.http2 import Kind

from chaos.calling import request
from chaos.faults.kind import Fault
from chaos.site import PROMPTS, Site

GENERATE = "/pageturner.v1.GenerationService/Generate"
STREAM = "/pageturner.v1.GenerationService/GenerateStream"

Script = Callable[[Site, Random], list[bytes]]
"""What is sent behind preface and settings, in pieces."""


def _headers(stream_id: int, headers: http2.Headers, flags: int = http2.END_HEADERS) -> bytes:
    return http2.frame(Kind.HEADERS, flags, stream_id, http2.header_block(headers))


def _whole_call(site: Site, stream_id: int, path: str = STREAM) -> bytes:
    asked = request(site.ledger.new_id("frames"), PROMPTS[0], max_tokens=20)
    return http2.call(stream_id, path, asked.SerializeToString())


def rapid_reset(site: Site, random: Random) -> list[bytes]:
    """CVE-2023-44487: calls begun and reset at once, without end."""
    return [_whole_call(site, 2 * i + 1) + http2.reset(2 * i + 1) for i in range(1000)]


def rapid_reset_of_headers(site: Site, random: Random) -> list[bytes]:
    """The same with headers alone."""
    block = _headers(1, http2.call_headers(STREAM))[9:]
    return [
        http2.frame(Kind.HEADERS, http2.END_HEADERS, 2 * i + 1, block) + http2.reset(2 * i + 1)
        for i in range(2000)
    ]


def settings_flood(site: Site, random: Random) -> list[bytes]:
    """Each wants an acknowledgement (CVE-2019-9515)."""
    return [http2.settings((http2.INITIAL_WINDOW_SIZE, 65535 + i % 2)) for i in range(5000)]


def ping_flood(site: Site, random: Random) -> list[bytes]:
    """Each wants an answer (CVE-2019-9512)."""
    return [http2.frame(Kind.PING, 0, 0, struct.pack(">Q", i)) for i in range(5000)]


def continuation_flood(site: Site, random: Random) -> list[bytes]:
    """A header block that never ends (CVE-2024-27316 and its kin)."""
    more = http2.frame(Kind.CONTINUATION, 0, 1, http2.header_block([(b"x", b"y" * 4000)] * 4))
    return [_headers(1, http2.call_headers(STREAM), flags=0), *([more] * 500)]


def oversized_headers(site: Site, random: Random) -> list[bytes]:
    """More metadata than the server takes."""
    extra = [(b"x-%d" % i, b"y" * 1000) for i in range(15)]
    block = http2.header_block([*http2.call_headers(STREAM), *extra])
    rest = http2.frame(Kind.CONTINUATION, http2.END_HEADERS, 1, http2.header_block(extra * 20)[:16000])
    return [http2.frame(Kind.HEADERS, 0, 1, block), rest]


def header_bomb(site: Site, random: Random) -> list[bytes]:
    """One large entry of the table, named tens of thousands of times by one byte each."""
    large = b"\x40" + http2.header_block([(b"x-large", b"y" * 3900)])[1:]
    opening = http2.header_block(http2.call_headers(STREAM)) + large
    flood = http2.frame(Kind.CONTINUATION, 0, 1, b"\xbe" * 16000)
    return [http2.frame(Kind.HEADERS, 0, 1, opening), *([flood] * 4)]


def window_overflow(site: Site, random: Random) -> list[bytes]:
    """A window beyond 2^31 - 1, one that grows by nothing, and one of a stream that never was."""
    pieces = [(0, 0x7FFFFFFF), (0, 0x7FFFFFFF), (1, 0), (99, 1)]
    return [http2.frame(Kind.WINDOW_UPDATE, 0, stream, struct.pack(">I", more)) for stream, more in pieces]


def small_windows(site: Site, random: Random) -> list[bytes]:
    """An answer that may be sent by single bytes (CVE-2019-9511)."""
    grow = struct.pack(">I", 1)
    drip = http2.frame(Kind.WINDOW_UPDATE, 0, 1, grow)
    return [http2.settings((http2.INITIAL_WINDOW_SIZE, 0)), _whole_call(site, 1), *([drip] * 500)]


def empty_frames(site: Site, random: Random) -> list[bytes]:
    """DATA without data (CVE-2019-9518)."""
    return [_headers(1, http2.call_headers(STREAM)), *([http2.frame(Kind.DATA, 0, 1)] * 5000)]


def wrong_order(site: Site, random: Random) -> list[bytes]:
    """DATA before HEADERS, streams that go backwards or are the server's, HEADERS twice."""
    piece = random.choice(
        (
            http2.data(1, http2.message(b"x")),
            _whole_call(site, 7) + _whole_call(site, 3),
            _headers(2, http2.call_headers(STREAM)),
            _headers(1, http2.call_headers(STREAM)) * 2,
            http2.data(0, b"x"),
            _headers(0, http2.call_headers(STREAM)),
            http2.frame(Kind.PUSH_PROMISE, http2.END_HEADERS, 1, struct.pack(">I", 2)),
            http2.frame(Kind.CONTINUATION, http2.END_HEADERS, 1, b""),
            http2.frame(Kind.GOAWAY, 0, 0, struct.pack(">II", 0, 0)) + _whole_call(site, 1),
        )
    )
    return [piece]


def wrong_lengths(site: Site, random: Random) -> list[bytes]:
    """Frames of a size that their type does not have, or that no server takes."""
    kind = random.choice((Kind.PING, Kind.RST_STREAM, Kind.SETTINGS, Kind.WINDOW_UPDATE, Kind.PRIORITY))
    return [
        http2.frame(kind, 0, 0, b"123"),
        http2.frame(Kind.DATA, 0, 1, b"x" * 100, length=(1 << 24) - 1),
        random.randbytes(40_000),
    ]


def wrong_settings(site: Site, random: Random) -> list[bytes]:
    """Values that are not allowed, and names that nobody knows."""
    pair = random.choice(
        (
            (http2.INITIAL_WINDOW_SIZE, 1 << 31),
            (http2.MAX_FRAME_SIZE, 1),
            (2, 7),
            (0xFFFF, 1),
            (1, 0xFFFFFFFF),
        )
    )
    return [http2.settings(pair), _whole_call(site, 1)]


def wrong_headers(site: Site, random: Random) -> list[bytes]:
    """No gRPC, no path, no UTF-8, a timeout that is none, metadata that is no base64."""
    usual = dict(http2.call_headers(GENERATE))
    changes: list[dict[bytes, bytes]] = [
        {b"content-type": b"text/html"},
        {b":method": b"GET"},
        {b":path": b""},
        {b":path": b"/" * 4000},
        {b":path": b"/a/b/c/d"},
        {b":path": b"nothing"},
        {b":path": b"/\xff\xfe/\x00"},
        {b"te": b"chunked"},
        {b"grpc-timeout": b"99999999999999999999H"},
        {b"grpc-timeout": b"-1S"},
        {b"grpc-timeout": b"0n"},
        {b"x-bin": b"not base64!"},
        {b"UPPER": b"case"},
        {b"": b"no name"},
        {b"authorization": b"\x00\xff" * 50},
        {b"traceparent": b"\xff" * 500},
    ]
    body = http2.data(1, http2.message(b""))
    pieces = []
    for number, change in enumerate(random.sample(changes, 6)):
        stream_id = 2 * number + 1
        pieces.append(_headers(stream_id, tuple((usual | change).items())))
        pieces.append(http2.data(stream_id, http2.message(b"")))
    return [*pieces, body]


def truncated(site: Site, random: Random) -> list[bytes]:
    """A good call, cut anywhere."""
    whole = _whole_call(site, 1)
    return [whole[: random.randrange(len(whole))]]


def flipped_bits(site: Site, random: Random) -> list[bytes]:
    """A good call, some bits of it changed."""
    whole = bytearray(_whole_call(site, 1))
    for _ in range(random.randint(1, 8)):
        whole[random.randrange(len(whole))] ^= 1 << random.randrange(8)
    return [bytes(whole)]


def many_streams(site: Site, random: Random) -> list[bytes]:
    """More calls at once than a connection may have, none of which ends by itself."""
    block = http2.header_block(http2.call_headers(STREAM))
    return [http2.frame(Kind.HEADERS, http2.END_HEADERS, 2 * i + 1, block) for i in range(3000)]


SCRIPTS: Mapping[str, Script] = {
    "rapid reset": rapid_reset,
    "rapid reset of headers": rapid_reset_of_headers,
    "settings flood": settings_flood,
    "ping flood": ping_flood,
    "continuation flood": continuation_flood,
    "oversized headers": oversized_headers,
    "header bomb": header_bomb,
    "window overflow": window_overflow,
    "windows of a byte": small_windows,
    "empty frames": empty_frames,
    "wrong order": wrong_order,
    "wrong lengths": wrong_lengths,
    "wrong settings": wrong_settings,
    "wrong headers": wrong_headers,
    "truncated calls": truncated,
    "flipped bits": flipped_bits,
    "thousands of streams": many_streams,
}


def _fault(script: Script) -> Fault:
    async def inject(site: Site, random: Random) -> None:
        site.expected_faults |= {"library"}  # grpcio logs metadata that is no UTF-8
        connection = await http2.Connection.open(site.server.target)
        pieces = script(site, random)
        await connection.hello()
        await connection.send(*pieces, seconds=10.0)
        if random.random() < 0.5:
            await connection.frames(0.2)
            connection.close()
        else:
            connection.reset()

    inject.__doc__ = script.__doc__
    return inject


FAULTS: Mapping[str, Fault] = {name: _fault(script) for name, script in SCRIPTS.items()}
