"""What strangers may have a server hold: names of any length, calls that never send their message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from support import http2
from support.fake_engine import FakeEngine
from support.identities import authenticator
from support.serving import serving

from pageturner.service.errors import DeadlineExceeded, InvalidArgument, QueueFull
from pageturner.service.rpc.open_calls import MAX_CALLS, MAX_MESSAGE_BYTES, OpenCalls

HEALTH = "/grpc.health.v1.Health"


class _Context:
    def __init__(self, peer: str = "ipv4:10.0.0.1:5") -> None:
        self._peer = peer

    def peer(self) -> str:
        return self._peer


async def _messages(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def _never() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def _length(request: bytes, context: Any) -> int:
    return len(request)


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_a_long_name_is_refused_and_not_held(method: str) -> None:
    async with serving(FakeEngine(), authenticator=authenticator()) as served:
        open_call: Any = served.channel.unary_stream(f"{HEALTH}/{method}")
        call = open_call(health_pb2.HealthCheckRequest(service="x" * 100_000).SerializeToString(), timeout=30)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "at most 4096" in (caught.value.details() or "")


async def test_calls_that_send_their_name_alone_are_few_for_each_connection() -> None:
    async with serving(FakeEngine(), authenticator=authenticator()) as served:
        connection = await http2.Connection.open(f"127.0.0.1:{served.port}")
        await connection.hello()
        headers = http2.header_block(http2.call_headers(f"{HEALTH}/Watch"))
        num_ended, num_calls = 0, MAX_CALLS + 10
        for number in range(num_calls):
            opening = http2.frame(http2.Kind.HEADERS, http2.END_HEADERS, 1 + 2 * number, headers)
            assert await connection.send(opening)
        async with asyncio.timeout(30):
            while num_ended < num_calls - MAX_CALLS:
                kind, flags, *_ = await connection.next_frame()
                num_ended += kind == http2.Kind.HEADERS and bool(flags & http2.END_STREAM)
        assert await served.client.is_serving()  # another connection
        connection.close()


async def test_a_message_that_does_not_come_is_not_waited_for() -> None:
    calls = OpenCalls(message_seconds=0.01)
    answer: Any = calls.unary(_length, bytes)
    with pytest.raises(DeadlineExceeded, match="no message"):
        await answer(_never(), _Context())
    with pytest.raises(InvalidArgument, match="without a message"):
        await answer(_messages(), _Context())
    with pytest.raises(InvalidArgument, match=f"at most {MAX_MESSAGE_BYTES}"):
        await answer(_messages(bytes(MAX_MESSAGE_BYTES + 1)), _Context())
    assert await answer(_messages(bytes(MAX_MESSAGE_BYTES)), _Context()) == MAX_MESSAGE_BYTES


async def test_the_count_is_of_each_connection_and_goes_back() -> None:
    calls, context = OpenCalls(), _Context()
    answer: Any = calls.unary(_length, bytes)
    waiting = [asyncio.create_task(answer(_never(), context)) for _ in range(MAX_CALLS)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await answer(_messages(b"x"), context)
    assert await answer(_messages(b"x"), _Context("ipv4:10.0.0.1:6")) == 1
    assert await answer(_messages(b"x"), _Context("unix:")) == 1
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert not calls.num_calls
    assert await answer(_messages(b"x"), context) == 1


async def test_of_all_connections_the_one_with_most_calls_gives_its_oldest_up() -> None:
    calls = OpenCalls(max_calls=4)
    answer: Any = calls.unary(_length, bytes)

    def hold(connection: int) -> asyncio.Task[int]:
        return asyncio.create_task(answer(_never(), _Context(f"ipv4:10.0.0.1:{connection}")))

    few, *many = hold(1), hold(2), hold(2), hold(2)
    await asyncio.sleep(0)
    assert await answer(_messages(b"x"), _Context("ipv4:10.0.0.2:1")) == 1  # a probe, while all are taken
    with pytest.raises(QueueFull, match="4 such calls are open"):
        await many[0]
    assert calls.num_calls == 3
    assert not any(task.done() for task in (few, *many[1:]))
    later = [hold(connection) for connection in range(3, 7)]
    await asyncio.wait(many[1:], return_when=asyncio.FIRST_COMPLETED)
    assert calls.num_calls == 4
    for task in (few, *many[1:], *later):
        task.cancel()
    await asyncio.gather(few, *many[1:], *later, return_exceptions=True)
    assert not calls.num_calls
