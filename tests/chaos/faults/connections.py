"""Connections that speak no HTTP/2, or nothing, and far too many of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from random import Random

from support import http2

from chaos.faults.kind import Fault
from chaos.site import Site

PATIENCE_SECONDS = 30.0
"""For the server to hang up; it is told to after two."""

TLS_HELLO = bytes.fromhex("160301002f0100002b0303") + bytes(32) + bytes.fromhex("000004130113020100")
OTHER_PROTOCOLS = (
    TLS_HELLO,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /pageturner.v1.GenerationService/Generate HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"\x00\x00\x00\x00",
    b"\xff" * 4096,
)


async def random_bytes(site: Site, random: Random) -> None:
    """At any place of the protocol: at once, behind the preface, behind the settings."""

    async def one(opening: bytes, tail: bytes) -> None:
        with suppress(OSError):
            connection = await http2.Connection.open(site.server.target)
            await connection.send(opening, tail)
            if random.random() < 0.5:
                connection.reset()
            else:
                connection.close()

    openings = (b"", http2.PREFACE[: random.randrange(24)], http2.PREFACE, http2.PREFACE + http2.settings())
    await asyncio.gather(
        *(
            one(random.choice(openings), random.randbytes(random.choice((1, 9, 100, 20_000))))
            for _ in range(40)
        )
    )


async def other_protocols(site: Site, random: Random) -> None:
    """TLS, HTTP/1.1, SSH: the server hangs up."""

    async def one(opening: bytes) -> None:
        connection = await http2.Connection.open(site.server.target)
        await connection.send(opening)
        if not await connection.is_closed_within(PATIENCE_SECONDS):
            site.ledger.problem(f"a connection that opened with {opening[:20]!r} was kept for 30 s")
        connection.close()

    await asyncio.gather(*map(one, OTHER_PROTOCOLS))


async def never_begins(site: Site, random: Random) -> None:
    """Connections that say nothing, or half a preface: closed by the server, their descriptors free."""
    connections = [await http2.Connection.open(site.server.target) for _ in range(100)]
    for connection in connections[::2]:
        await connection.send(http2.PREFACE[:12])
    closed = await asyncio.gather(*(c.is_closed_within(PATIENCE_SECONDS) for c in connections))
    if not all(closed):
        site.ledger.problem(f"{closed.count(False)} of 100 connections without a preface were kept for 30 s")
    for connection in connections:
        connection.close()


async def idle_connections(site: Site, random: Random) -> None:
    """Hundreds that greet and never call: closed by the server after its idle time."""
    connections = [await http2.Connection.open(site.server.target) for _ in range(100)]
    for connection in connections:
        await connection.hello()

    async def closed(connection: http2.Connection) -> bool:
        """Acknowledges pings, as a peer that lives does."""
        for _ in range(100):
            for kind, flags, _, payload in await connection.frames(0.3):
                if kind == http2.Kind.PING and not flags & http2.ACK:
                    await connection.send(http2.frame(http2.Kind.PING, http2.ACK, 0, payload))
                elif kind == http2.Kind.GOAWAY:
                    return True
        return False

    outcomes = await asyncio.gather(*map(closed, connections))
    if not all(outcomes):
        site.ledger.problem(f"{outcomes.count(False)} of 100 idle connections were kept for 30 s")
    for connection in connections:
        connection.close()


FAULTS: Mapping[str, Fault] = {
    "random bytes": random_bytes,
    "other protocols": other_protocols,
    "connections without a preface": never_begins,
    "idle connections": idle_connections,
}
