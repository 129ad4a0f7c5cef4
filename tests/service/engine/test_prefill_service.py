"""Prompts computed for another server: whatever ends the request ends the hand-over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from pageturner.service.core.memory.prefix_cache import PrefixHasher
from pageturner.service.core.memory.transfers import Save, Withhold
from pageturner.service.engine.api import GenerationRequest, RequestStream
from pageturner.service.engine.block_sender import BlockSender
from pageturner.service.engine.fingerprint import Fingerprint
from pageturner.service.engine.handover import HandedBlock, PrefillOrder
from pageturner.service.engine.prefill_service import PrefillService
from pageturner.service.errors import EngineDead

BLOCK = 4
ORDER = PrefillOrder(tuple(range(3 * BLOCK)), "weights=x", "layout")


class Stream:
    """A request's stream without events, which ends as it is told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.is_closed = False
        self._end = asyncio.Event()
        if error is not None:
            self._end.set()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        await self._end.wait()
        assert self.error is not None
        raise self.error

    async def aclose(self) -> None:
        self.is_closed = True


def service(sender: BlockSender, stream: Stream) -> PrefillService:
    async def submit(request: GenerationRequest) -> RequestStream:
        assert request.hands_over
        return cast(RequestStream, stream)

    return PrefillService(
        sender,
        PrefixHasher(b""),
        Fingerprint("weights=x", is_exact=True),
        "layout",
        BLOCK,
        submit,
        shares_prefixes=True,
        allow_inexact=False,
    )


@pytest.mark.parametrize("error", [EngineDead("planted"), ZeroDivisionError("a fault of ours")])
async def test_what_the_request_ends_with_is_raised(error: Exception) -> None:
    sender = BlockSender(lambda block: memoryview(b"kv"))
    stream = Stream(error)
    with pytest.raises(type(error)):
        await asyncio.wait_for(anext(service(sender, stream).prefill(ORDER)), 30.0)
    assert stream.is_closed
    assert not sender._wanted
    assert not sender.is_busy


async def test_blocks_come_in_order_up_to_the_first_that_is_withheld() -> None:
    sender = BlockSender(lambda block: memoryview(bytes([block])))
    stream = Stream()
    hashes = PrefixHasher(b"").chain(ORDER.token_ids, BLOCK, adapter="", salt="")
    blocks = service(sender, stream).prefill(ORDER)
    coming = asyncio.ensure_future(anext(blocks))
    await asyncio.sleep(0)  # the hand-over is open before its blocks are made
    sender.start((Save(7, hashes[1]), Save(5, hashes[0]), Withhold(hashes[2])), lambda: None)
    handed = [await coming, *[block async for block in blocks]]
    assert handed == [HandedBlock(0, bytes([5])), HandedBlock(1, bytes([7]))]
    assert stream.is_closed
    assert not sender._held
    assert {end.host_block for end in sender.take_ended()} == {5, 7}


async def test_a_reader_that_leaves_ends_the_request_and_gives_up_its_blocks() -> None:
    sender = BlockSender(lambda block: memoryview(b"kv"))
    stream = Stream()
    hashes = PrefixHasher(b"").chain(ORDER.token_ids, BLOCK, adapter="", salt="")
    blocks = service(sender, stream).prefill(ORDER)
    coming = asyncio.ensure_future(anext(blocks))
    await asyncio.sleep(0)
    sender.start((Save(5, hashes[0]), Save(6, hashes[1])), lambda: None)
    assert (await coming).index == 0
    await blocks.aclose()
    assert stream.is_closed
    assert not sender._wanted
    assert not sender._held
    assert {end.host_block for end in sender.take_ended()} == {5, 6}
