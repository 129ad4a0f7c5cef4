"""AdminService.GetFlightRecord over a real channel."""

from __future__ import annotations

import pytest
from support.fake_engine import FakeEngine
from support.serving import serving

from pageturner.service.errors import NotRecorded
from pageturner.service.rpc.admin import CHUNK_BYTES
from pageturner.v1 import admin_pb2, admin_pb2_grpc


async def test_a_file_larger_than_a_message_arrives_whole() -> None:
    engine = FakeEngine()
    engine.flight = bytes(range(256)) * (20 << 12)  # 20 MiB; a client takes messages of 4
    async with serving(engine) as served:
        assert await served.client.flight_record() == engine.flight


async def test_pieces_are_full_but_the_last() -> None:
    engine = FakeEngine()
    engine.flight = b"x" * (2 * CHUNK_BYTES + 1)
    async with serving(engine) as served:
        call = admin_pb2_grpc.AdminServiceStub(served.channel).GetFlightRecord(
            admin_pb2.GetFlightRecordRequest()
        )
        assert [len(piece.chunk) async for piece in call] == [CHUNK_BYTES, CHUNK_BYTES, 1]


async def test_a_server_that_records_nothing_says_so() -> None:
    async with serving(FakeEngine()) as served:
        with pytest.raises(NotRecorded, match="nothing is recorded"):
            await served.client.flight_record()
