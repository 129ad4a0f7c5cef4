"""Thousands of calls in one moment: each has an answer of the service's own."""

from __future__ import annotations

import asyncio
import struct

from support import http2
from support.fake_engine import FakeEngine
from support.serving import serving

from pageturner.v1 import model_pb2 as pb

NUM_CALLS = 2500
PATH = "/pageturner.v1.ModelService/ListModels"


async def test_no_call_of_a_burst_is_cancelled_by_grpc() -> None:
    """It cancels calls that no handler has met, from a thousand on at random, unless it is told otherwise."""
    body = pb.ListModelsRequest().SerializeToString()
    burst = b"".join(http2.call(2 * number + 1, PATH, body) for number in range(NUM_CALLS))
    room = http2.frame(http2.Kind.WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 30))
    async with serving(FakeEngine()) as served:
        connection = await http2.Connection.open(f"127.0.0.1:{served.port}")
        await connection.hello()
        assert await connection.send(room, burst, seconds=60)
        num_ended = num_answered = 0
        async with asyncio.timeout(60):
            while num_ended < NUM_CALLS:
                kind, flags, _, payload = await connection.next_frame()
                num_answered += kind == http2.Kind.DATA and len(payload) > 5
                num_ended += kind == http2.Kind.HEADERS and bool(flags & http2.END_STREAM)
        connection.close()
    assert num_answered == NUM_CALLS
