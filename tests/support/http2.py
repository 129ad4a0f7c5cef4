"""HTTP/2 as bytes (RFC 9113, RFC 7541), good and bad: what no gRPC library would send."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

END_STREAM = ACK = 0x1
END_HEADERS = 0x4

HEADER_TABLE_SIZE, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 3, 4, 5
"""Names of settings."""

DEFAULT_WINDOW = 65535
"""Bytes of DATA that may be sent before a peer says otherwise."""

CANCEL = 0x8
"""An error code of RST_STREAM."""


class Kind(IntEnum):
    """Types of frames."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


Headers = Sequence[tuple[bytes, bytes]]


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"", *, length: int | None = None) -> bytes:
    """length: what the frame claims, where that is not its payload's."""
    claimed = len(payload) if length is None else length
    return struct.pack(">I", claimed)[1:] + bytes([kind, flags]) + struct.pack(">I", stream_id) + payload


def settings(*pairs: tuple[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(Kind.SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in pairs))


def reset(stream_id: int, error: int = CANCEL) -> bytes:
    """An RST_STREAM frame."""
    return frame(Kind.RST_STREAM, 0, stream_id, struct.pack(">I", error))


def header_block(headers: Headers) -> bytes:
    """Each header as a literal that enters no table, without Huffman coding."""
    return b"".join(b"\x10" + _text(name) + _text(value) for name, value in headers)


def call_headers(path: str, extra: Headers = ()) -> Headers:
    """Those of a gRPC call."""
    return (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        *extra,
    )


def message(body: bytes, *, is_compressed: bool = False, length: int | None = None) -> bytes:
    """A gRPC message as it lies in DATA frames. length: what it claims."""
    return struct.pack(">BI", is_compressed, len(body) if length is None else length) + body


def call(stream_id: int, path: str, body: bytes, extra: Headers = ()) -> bytes:
    """A whole unary request: headers, one message, and the end of the client's side."""
    opening = frame(Kind.HEADERS, END_HEADERS, stream_id, header_block(call_headers(path, extra)))
    return opening + data(stream_id, message(body))


def data(stream_id: int, payload: bytes, *, ends: bool = True) -> bytes:
    """DATA frames of the size that every server takes."""
    pieces = [payload[start : start + 16384] for start in range(0, len(payload), 16384)] or [b""]
    flags = [0] * (len(pieces) - 1) + [END_STREAM if ends else 0]
    return b"".join(
        frame(Kind.DATA, flag, stream_id, piece) for flag, piece in zip(flags, pieces, strict=True)
    )


def _text(text: bytes) -> bytes:
    return _integer(len(text)) + text


def _integer(value: int) -> bytes:
    """With a prefix of seven bits, the eighth being 0."""
    if value < 127:
        return bytes([value])
    value -= 127
    out = bytearray([127])
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    out.append(value)
    return bytes(out)


class Connection:
    """A connection whose client sends what it likes, and reads only when told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._head = b""

    @classmethod
    async def open(cls, target: str, *, receive_buffer: int | None = None) -> Connection:
        """receive_buffer: bytes that the system takes in from the server before the client reads."""
        host, _, port = target.rpartition(":")
        endpoint = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer is not None:
            endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        endpoint.setblocking(False)
        await asyncio.get_running_loop().sock_connect(endpoint, (host, int(port)))
        return cls(*await asyncio.open_connection(sock=endpoint, limit=1 << 12))

    async def send(self, *pieces: bytes, seconds: float = 10.0) -> bool:
        """Whether the server took them all; it may close at any byte, or stop reading."""
        try:
            async with asyncio.timeout(seconds):
                for piece in pieces:
                    self._writer.write(piece)
                    await self._writer.drain()
        except (OSError, TimeoutError):
            return False
        return True

    async def hello(self, *pairs: tuple[int, int]) -> bool:
        """The preface and settings."""
        return await self.send(PREFACE + settings(*pairs))

    async def upload(self, stream_id: int, payload: bytes, seconds: float) -> bool:
        """Send DATA as the server's windows allow; whether it took all of it within the time."""
        room = {0: DEFAULT_WINDOW, stream_id: DEFAULT_WINDOW}
        initial = DEFAULT_WINDOW
        sent = 0
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(seconds):
                while sent < len(payload):
                    size = min(16384, min(room.values()), len(payload) - sent)
                    if size > 0:
                        piece = payload[sent : sent + size]
                        sent += size
                        ends = END_STREAM if sent == len(payload) else 0
                        self._writer.write(frame(Kind.DATA, ends, stream_id, piece))
                        await self._writer.drain()
                        room = {key: left - size for key, left in room.items()}
                        continue
                    kind, flags, stream, content = await self.next_frame()
                    if kind == Kind.WINDOW_UPDATE and stream in room:
                        room[stream] += int.from_bytes(content, "big")
                    elif kind == Kind.SETTINGS and not flags & ACK:
                        for name, value in struct.iter_unpack(">HI", content):
                            if name == INITIAL_WINDOW_SIZE:
                                room[stream_id] += value - initial
                                initial = value
                    elif kind in (Kind.GOAWAY, Kind.RST_STREAM):
                        return False
        return sent == len(payload)

    async def frames(self, seconds: float) -> list[tuple[int, int, int, bytes]]:
        """(type, flags, stream, payload) of all that comes until the server closes, or for so long."""
        found = []
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(seconds):
                while True:
                    found.append(await self.next_frame())
        return found

    async def until(self, kinds: Iterable[int], seconds: float) -> bool:
        """Whether a frame of one of these types comes within the time."""
        wanted = frozenset(kinds)
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(seconds):
                while True:
                    if (await self.next_frame())[0] in wanted:
                        return True
        return False

    async def next_frame(self) -> tuple[int, int, int, bytes]:
        """(type, flags, stream, payload). One that a timeout cut short is gone on with by the next call."""
        if not self._head:
            self._head = await self._reader.readexactly(9)
        payload = await self._reader.readexactly(int.from_bytes(self._head[:3], "big"))
        head, self._head = self._head, b""
        return head[3], head[4], int.from_bytes(head[5:], "big") & 0x7FFFFFFF, payload

    async def is_closed_within(self, seconds: float) -> bool:
        """Whether the server closes the connection; what it sends is dropped."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                try:
                    while await self._reader.read(1 << 16):
                        pass
                except OSError:
                    pass
                return True
        return False

    async def half_close(self) -> None:
        """No more will be sent; what comes may still be read."""
        with suppress(OSError):
            self._writer.write_eof()

    def reset(self) -> None:
        """End it by a TCP reset, as a machine does that has forgotten it."""
        endpoint = self._writer.get_extra_info("socket")
        with suppress(OSError):
            endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def close(self) -> None:
        """Close without reading what is left."""
        self._writer.close()
