"""Computes prompts for servers that decode: a request of one token whose blocks are handed over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

from pageturner.service.core.memory.prefix_cache import PrefixHasher
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.engine.api import GenerationRequest, RequestStream
from pageturner.service.engine.block_sender import BlockSender, Delivery
from pageturner.service.engine.fingerprint import Fingerprint
from pageturner.service.engine.handover import HandedBlock, PrefillOrder
from pageturner.service.errors import HandoverRefused, InvalidArgument
from pageturner.service.identity import ANONYMOUS

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
"""Nothing samples less; it is thrown away, since the decoding server samples its own."""


class PrefillService:
    """Lives on the event loop. sender: None where this server prefills for no other. hasher: the scheduler's.

    fingerprint, layout: of KV that is made here. submit: opens a request's stream. shares_prefixes: as the
    engine's. allow_inexact: whether the fingerprint of who asks may differ in what only moves last bits.
    """

    def __init__(
        self,
        sender: BlockSender | None,
        hasher: PrefixHasher | None,
        fingerprint: Fingerprint,
        layout: str,
        block_size: int,
        submit: Callable[[GenerationRequest], Awaitable[RequestStream]],
        *,
        shares_prefixes: bool,
        allow_inexact: bool,
    ) -> None:
        self._sender = sender
        self._hasher = hasher
        self._fingerprint = fingerprint
        self._layout = layout
        self._block_size = block_size
        self._submit = submit
        self._shares_prefixes = shares_prefixes
        self._allow_inexact = allow_inexact

    async def prefill(self, order: PrefillOrder) -> AsyncGenerator[HandedBlock, None]:
        """`handover.PrefillSource`. Leaving it ends the computation."""
        if self._sender is None or self._hasher is None:
            reason = "this server computes no prompts for others: its handover.role is not prefill"
            raise HandoverRefused(reason, "")
        self._check(order)
        identity = replace(ANONYMOUS, tenant=order.tenant) if order.tenant else ANONYMOUS
        hashes = self._hasher.chain(
            order.token_ids,
            self._block_size,
            adapter="",
            salt=order.cache_salt,
            tenant="" if self._shares_prefixes else order.tenant,
        )[order.first_block :]
        with self._sender.open(hashes) as delivery:
            stream = await self._submit(
                GenerationRequest(
                    order.token_ids,
                    ONE_TOKEN,
                    request_id=order.request_id,
                    priority=order.priority,
                    cache_salt=order.cache_salt,
                    deadline_seconds=order.deadline_seconds,
                    identity=identity,
                    hands_over=True,
                )
            )
            reading = asyncio.create_task(_read(stream, delivery))
            try:
                index = order.first_block
                async for content in delivery.blocks():
                    yield HandedBlock(index, content)
                    index += 1
            finally:
                reading.cancel()
                try:
                    await asyncio.wait((reading,))  # which raises where this task is cancelled, and only then
                finally:
                    await stream.aclose()

    def _check(self, order: PrefillOrder) -> None:
        self._fingerprint.check_handover(order.fingerprint, allow_inexact=self._allow_inexact)
        if order.layout != self._layout:
            reason = f"the servers lay blocks out otherwise: {order.layout}, here {self._layout}"
            raise HandoverRefused(reason, "layout")
        num_blocks = len(order.token_ids) // self._block_size
        if order.first_block > num_blocks:
            reason = f"{order.first_block} lies behind the {num_blocks} full blocks of the prompt"
            raise InvalidArgument("first_block", reason)


async def _read(stream: RequestStream, delivery: Delivery) -> None:
    """The request's events tell nothing but how it ends, be it by a fault of ours."""
    try:
        async for _ in stream:
            pass
    except Exception as error:
        delivery.fail(error)
