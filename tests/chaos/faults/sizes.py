"""Messages that are too large, or become so."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Mapping
from functools import cache
from random import Random

import grpc
from support import http2

from chaos.faults.kind import Fault
from chaos.site import Site
from pageturner.v1 import generation_pb2 as pb
from pageturner.v1.generation_pb2_grpc import GenerationServiceStub

GENERATE = "/pageturner.v1.GenerationService/Generate"
BOMB_SECONDS = 30.0
MOST_GROWTH = 64 << 20
"""Bytes that the server may grow by while it refuses one message."""


async def four_mebibytes(site: Site, random: Random) -> None:
    """The limit is named in the error, and the connection lives on."""
    text = "x" * (4 << 20)
    try:
        await site.stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text=text)))
    except grpc.aio.AioRpcError as error:
        named = str(2 << 20) in (error.details() or "")
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED or not named:
            site.ledger.problem(f"4 MiB: {error.code().name}: {error.details()}")
    else:
        site.ledger.problem("a message of 4 MiB was taken")


async def claimed_length(site: Site, random: Random) -> None:
    """A gRPC prefix that claims up to 4 GiB, and one that claims less than comes."""
    for length in (1 << 31, (1 << 32) - 1, 3):
        connection = await http2.Connection.open(site.server.target)
        await connection.hello()
        opening = http2.header_block(http2.call_headers(GENERATE))
        await connection.send(http2.frame(http2.Kind.HEADERS, http2.END_HEADERS, 1, opening))
        await connection.send(http2.data(1, http2.message(b"\0" * 64, length=length)))
        await connection.until((http2.Kind.HEADERS, http2.Kind.RST_STREAM, http2.Kind.GOAWAY), 5.0)
        connection.close()


@cache
def bomb(encoding: str, num_bytes: int) -> bytes:
    """So many zeros, packed a thousandfold."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31 if encoding == "gzip" else 15)
    chunk = bytes(1 << 20)
    pieces = [packer.compress(chunk) for _ in range(num_bytes >> 20)]
    return b"".join([*pieces, packer.flush()])


async def compression_bombs(site: Site, random: Random) -> None:
    """Messages within the limit, a thousand times as large when unpacked: refused, and not held in memory."""
    for encoding in ("gzip", "deflate"):
        body = http2.message(await asyncio.to_thread(bomb, encoding, 512 << 20), is_compressed=True)
        before = site.server.figures().resident_bytes
        site.server.forget_peak()
        connection = await http2.Connection.open(site.server.target)
        await connection.hello((http2.INITIAL_WINDOW_SIZE, 1 << 20))
        headers = http2.call_headers(GENERATE, ((b"grpc-encoding", encoding.encode()),))
        opening = http2.frame(http2.Kind.HEADERS, http2.END_HEADERS, 1, http2.header_block(headers))
        await connection.send(opening, http2.frame(http2.Kind.WINDOW_UPDATE, 0, 0, b"\0\x10\0\0"))
        await connection.upload(1, body, BOMB_SECONDS)
        if not await connection.until((http2.Kind.HEADERS, http2.Kind.RST_STREAM), BOMB_SECONDS):
            site.ledger.problem(f"a {encoding} bomb was not answered")
        growth = site.server.peak_bytes - before
        connection.close()
        if growth > MOST_GROWTH:
            site.ledger.problem(
                f"a {encoding} bomb of {len(body)} bytes grew the server by {growth >> 20} MiB"
            )


async def bad_compression(site: Site, random: Random) -> None:
    """Bytes that are no gzip, a compressed flag without an encoding, an encoding that is not known."""
    whole = gzip.compress(pb.GenerateRequest(prompt=pb.Prompt(text="x")).SerializeToString())
    for encoding, body in (
        (b"gzip", random.randbytes(200)),
        (b"gzip", whole[: len(whole) // 2]),
        (b"identity", whole),
        (b"snappy", whole),
        (b"", whole),
    ):
        connection = await http2.Connection.open(site.server.target)
        await connection.hello()
        extra = ((b"grpc-encoding", encoding),) if encoding else ()
        headers = http2.header_block(http2.call_headers(GENERATE, extra))
        await connection.send(http2.frame(http2.Kind.HEADERS, http2.END_HEADERS, 1, headers))
        await connection.send(http2.data(1, http2.message(body, is_compressed=True)))
        await connection.until((http2.Kind.HEADERS, http2.Kind.RST_STREAM, http2.Kind.GOAWAY), 5.0)
        connection.close()


async def many_large(site: Site, random: Random) -> None:
    """Messages just below the limit, all at once: each is refused by its field."""
    async with site.new_channel() as channel:
        stub = GenerationServiceStub(channel)
        calls = [stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="y " * (900_000)))) for _ in range(6)]
        for call in calls:
            code = await call.code()
            if code is not grpc.StatusCode.INVALID_ARGUMENT:
                site.ledger.problem(f"a text of 1.8 MB: {code.name}")


FAULTS: Mapping[str, Fault] = {
    "messages of 4 MiB": four_mebibytes,
    "lengths that lie": claimed_length,
    "gzip and deflate bombs": compression_bombs,
    "bad compression": bad_compression,
    "large texts at once": many_large,
}
