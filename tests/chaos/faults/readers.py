"""Clients that read slowly, or not at all, or are silent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from random import Random

from support import http2

from chaos.calling import OK, REFUSED, Answer, request, stream
from chaos.faults.kind import Fault
from chaos.site import PROMPTS, Site

STREAM = "/pageturner.v1.GenerationService/GenerateStream"

PATIENCE_SECONDS = 30.0
"""For the server to give up on a client; it is told to after two."""


async def slow_readers(site: Site, random: Random) -> None:
    """A pause after each message: tokens pile up at the server, and come joined."""

    async def one(seconds: float) -> None:
        async def dawdle(answer: Answer) -> None:
            await asyncio.sleep(seconds)  # slowness is the fault itself

        asked = request(site.ledger.new_id("slow"), random.choice(PROMPTS), max_tokens=80)
        await stream(site.stub, site.ledger, asked, OK | REFUSED, on_message=dawdle)

    site.tolerate(REFUSED)
    await asyncio.gather(*(one(random.choice((0.0, 0.01, 0.05))) for _ in range(4)))


async def _start(
    site: Site, *pairs: tuple[int, int], max_tokens: int, request_id: str = ""
) -> http2.Connection:
    """A stream begun on a connection of its own that is not read from now on."""
    connection = await http2.Connection.open(site.server.target, receive_buffer=4096)
    asked = request(request_id or site.ledger.new_id("unread"), PROMPTS[3], max_tokens=max_tokens)
    site.ledger.num_requests += 1
    await connection.hello(*pairs)
    await connection.send(http2.call(1, STREAM, asked.SerializeToString()))
    return connection


async def never_reads(site: Site, random: Random) -> None:
    """No window for an answer, and pings are answered: the server must free the request by its own patience.

    The connection is the client's to keep: gRPC cannot send a status behind a message that has no room.
    """
    request_id = site.ledger.new_id("unread")
    connection = await _start(site, (http2.INITIAL_WINDOW_SIZE, 0), max_tokens=3000, request_id=request_id)

    async def answer_pings() -> None:
        while True:
            kind, flags, _, payload = await connection.next_frame()
            if kind == http2.Kind.PING and not flags & http2.ACK:
                await connection.send(http2.frame(http2.Kind.PING, http2.ACK, 0, payload))

    answering = asyncio.create_task(answer_pings())
    await site.until_logged("accepted", request_id)
    await site.until_logged("finished", request_id)
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)
    connection.close()


async def silent(site: Site, random: Random) -> None:
    """Half open: the peer is there for TCP alone. Pings go unanswered, and the server must hang up."""
    connection = await _start(site, max_tokens=4000)
    if not await connection.is_closed_within(PATIENCE_SECONDS):
        site.ledger.problem("a silent peer still had its connection after 30 s")
    connection.close()


async def half_closed(site: Site, random: Random) -> None:
    """The client's side is closed in mid-stream; the server may answer or hang up."""
    connection = await _start(site, max_tokens=200)
    await connection.until((http2.Kind.DATA, http2.Kind.GOAWAY), PATIENCE_SECONDS)
    await connection.half_close()
    if not await connection.is_closed_within(PATIENCE_SECONDS):
        site.ledger.problem("a half-closed connection was kept for 30 s")
    connection.close()


async def reset_by_peer(site: Site, random: Random) -> None:
    """TCP resets at any moment of a stream."""
    for _ in range(6):
        connection = await _start(site, max_tokens=500)
        if random.random() < 0.7:
            await connection.until((http2.Kind.DATA,), 1.0)
        connection.reset()


FAULTS: Mapping[str, Fault] = {
    "slow readers": slow_readers,
    "a client that never reads": never_reads,
    "a silent peer": silent,
    "half-closed connections": half_closed,
    "connections reset": reset_by_peer,
}
