"""A client of OpenAI's completions with streaming, as vLLM and llama.cpp speak it.

Written on asyncio streams: a general HTTP client takes 2.6 times the processor time a token, which on the
server's own cores would count against the peer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from pageturner.loadtest.client import Arrival, Outcome, RequestRecord
from pageturner.loadtest.peers.peer import Send
from pageturner.loadtest.workload import PlannedRequest

Event = Mapping[str, Any]
TokensSoFar = Callable[[Event, int], int]
"""How many tokens had come with an event, given how many had before it."""

_DATA = b"data: "
_DONE = b"[DONE]"
_MAX_LINE = 1 << 20


class BrokenAnswer(Exception):
    """What the server sent is no stream of completions."""


def completion(request: PlannedRequest) -> dict[str, Any]:
    """The fields that all servers know: greedy, streamed, past the end tokens."""
    return {
        "model": "model",
        "prompt": request.prompt_token_ids,
        "max_tokens": request.output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }


def count_token_ids(event: Event, before: int) -> int:
    """Of a server that names the ids of each event."""
    return before + sum(len(choice.get("token_ids") or ()) for choice in event["choices"])


@asynccontextmanager
async def completions(
    address: str,
    body: Callable[[PlannedRequest], Mapping[str, Any]],
    tokens_so_far: TokensSoFar,
    timeout_seconds: float = 600.0,
) -> AsyncIterator[Send]:
    """A connection for each request, as short-lived clients have it."""

    async def send(request: PlannedRequest, scheduled_at: float) -> RequestRecord:
        sent_at = time.monotonic()
        arrivals: list[Arrival] = []
        outcome, error, count = Outcome.OK, "", 0
        try:
            async with asyncio.timeout(timeout_seconds):
                async for event in _events(address, json.dumps(body(request)).encode()):
                    now_at = tokens_so_far(event, count)
                    if now_at > count:
                        arrivals.append(Arrival(time.monotonic(), now_at - count))
                        count = now_at
            if count != request.output_tokens:
                raise BrokenAnswer(f"{count} tokens came, {request.output_tokens} were asked for")
        except TimeoutError:
            outcome, error = Outcome.CANCELLED, f"no end within {timeout_seconds:g} s"
        except (OSError, EOFError, ValueError, LookupError, BrokenAnswer) as broken:
            outcome, error = Outcome.FAILED, f"{type(broken).__name__}: {broken}"
        return RequestRecord(
            index=request.index,
            outcome=outcome,
            error=error,
            scheduled_at=scheduled_at,
            sent_at=sent_at,
            ended_at=time.monotonic(),
            num_prompt_tokens=len(request.prompt_token_ids),
            arrivals=tuple(arrivals),
        )

    yield send


async def _events(address: str, body: bytes) -> AsyncIterator[Event]:
    """The events of one POST. Raises BrokenAnswer where it is refused or ends without [DONE]."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=_MAX_LINE)
    try:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        status, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
        if status.split()[1] != "200":
            raise BrokenAnswer(f"{status}: {(await reader.read(2000)).decode(errors='replace')}")
        is_chunked = any(field.lower().replace(" ", "") == "transfer-encoding:chunked" for field in fields)
        async for line in _lines(_chunks(reader) if is_chunked else _reads(reader)):
            if not line.startswith(_DATA):
                continue
            data = line.removeprefix(_DATA)
            if data == _DONE:
                return
            event = json.loads(data)
            if "error" in event:
                raise BrokenAnswer(str(event["error"]))
            yield event
        raise BrokenAnswer("the stream ended without [DONE]")
    finally:
        writer.close()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The pieces of a chunked body (RFC 9112, 7.1)."""
    while size := int((await reader.readline()).partition(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readline()


async def _reads(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The pieces of a body that ends with its connection."""
    while piece := await reader.read(_MAX_LINE):
        yield piece


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines that ended, wherever the pieces were cut; without their line ends."""
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")
