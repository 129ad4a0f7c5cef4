"""Tenants through the real engine: whose ids, whose cached blocks, whose limits. Only the model is a fake."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from support.real_service import (
    ENGINE_OPTIONS,
    TOKENIZER,
    VOCAB_SIZE,
    PagedModel,
    make_engine,
    scheduler_options,
)
from support.scripted import recording_logger

from pageturner.policies.views import Rates
from pageturner.service.core.clock import ManualClock
from pageturner.service.core.outputs import FinishedEvent, Usage
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.engine.api import (
    AbortOutcome,
    AcceptedEvent,
    GenerationRequest,
    ModelInfo,
    RequestStream,
    ServerInfo,
    StreamEvent,
)
from pageturner.service.engine.async_engine import AsyncEngine
from pageturner.service.engine.step_thread import StepThread
from pageturner.service.engine.thread_messages import Command
from pageturner.service.errors import DuplicateRequest, InvalidArgument, RequestAborted, TenantLimitReached
from pageturner.service.identity import ANONYMOUS, Identity, TenantLimits

ALICE, BOB = Identity("alice"), Identity("bob")
BLOCK_SIZE, NUM_BLOCKS = 4, 32
PROMPT = tuple(range(5, 5 + 4 * BLOCK_SIZE + 2))


@asynccontextmanager
async def serving(*, shares_prefixes: bool = False) -> AsyncIterator[tuple[AsyncEngine, PagedModel]]:
    model, clock = PagedModel(NUM_BLOCKS, 0, BLOCK_SIZE), ManualClock(1.0)
    engine = AsyncEngine(
        make_engine(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, clock=clock, model=model),
        TOKENIZER,
        model=ModelInfo(
            "tiny", "here", "Fake", "fake", "float32", True, VOCAB_SIZE, 64, 2, 1, 3, 0, (), False
        ),
        server_info=ServerInfo("1", 0.5, 0.0, BLOCK_SIZE, NUM_BLOCKS, 0, 1, 8, 16, "fake", Rates(), {}),
        scheduler_options=scheduler_options(),
        options=ENGINE_OPTIONS,
        clock=clock,
        random=Random(0),
        logger=recording_logger()[0],
        shares_prefixes=shares_prefixes,
    )
    await engine.start()
    try:
        yield engine, model
    finally:
        await engine.aclose()
        assert all(report.num_requests == 0 for report in engine.tenants(99).tenants)


@contextmanager
def few_steps(model: PagedModel) -> Iterator[None]:
    """One for each command, once it waits for the step's end: a request of 40 tokens cannot end meanwhile."""
    model.gate = gate = threading.Semaphore(0)
    send = StepThread.send

    def send_and_end_a_step(thread: StepThread, command: Command) -> None:
        send(thread, command)
        gate.release()

    with patch.object(StepThread, "send", send_and_end_a_step):
        yield
    gate.release(1000)


def request(
    identity: Identity, request_id: str = "", max_tokens: int | None = 3, **fields: Any
) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=1)
    return GenerationRequest(PROMPT, params, request_id, identity=identity, **fields)


async def read_all(stream: RequestStream) -> list[StreamEvent]:
    return [event async for event in stream]


async def usage_of(engine: AsyncEngine, asked: GenerationRequest) -> Usage:
    last = (await read_all(await engine.submit(asked)))[-1]
    assert isinstance(last, FinishedEvent)
    return last.usage


# --- ids -----------------------------------------------------------------------------------


async def test_two_tenants_may_use_one_id_at_once_and_hear_of_it_alone() -> None:
    async with serving() as (engine, model):
        with few_steps(model):
            streams = [await engine.submit(request(identity, "mine", 40)) for identity in (ALICE, BOB)]
            with pytest.raises(DuplicateRequest, match="'mine'"):
                await engine.submit(request(ALICE, "mine"))
        for stream in streams:
            events = await read_all(stream)
            assert {event.request_id for event in events} == {stream.request_id} == {"mine"}


async def test_an_abort_reaches_the_tenants_own_request_alone() -> None:
    async with serving() as (engine, model):
        with few_steps(model):
            stream = await engine.submit(request(ALICE, "mine", 40))
            assert await engine.abort("mine", tenant="bob") is AbortOutcome.NOT_FOUND
            assert await engine.abort("mine") is AbortOutcome.NOT_FOUND
            assert await engine.abort("mine", tenant="alice") is AbortOutcome.ABORTED
        with pytest.raises(RequestAborted):
            await read_all(stream)
        assert await engine.abort("mine", tenant="bob") is AbortOutcome.NOT_FOUND
        assert await engine.abort("mine", tenant="alice") is AbortOutcome.ALREADY_FINISHED


async def test_an_operator_aborts_by_the_id_that_records_have() -> None:
    async with serving() as (engine, model):
        with few_steps(model):
            stream = await engine.submit(request(Identity("a/b"), "c", 40))
            assert await engine.abort("a/b/c") is AbortOutcome.NOT_FOUND
            assert await engine.abort("a%2Fb/c") is AbortOutcome.ABORTED
        with pytest.raises(RequestAborted):
            await read_all(stream)


async def test_no_tenant_spells_the_id_of_another() -> None:
    pairs = [("a", "b/c"), ("a/b", "c"), ("a%2Fb", "c"), ("a", "b%2Fc")]
    async with serving() as (engine, _):
        for stream in [await engine.submit(request(Identity(tenant), name)) for tenant, name in pairs]:
            await read_all(stream)


# --- cached blocks -------------------------------------------------------------------------


async def test_a_prompt_is_not_found_cached_by_another_tenant() -> None:
    async with serving() as (engine, model):
        first = await usage_of(engine, request(ALICE))
        num_forwards = model.num_forwards
        other = await usage_of(engine, request(BOB))
        num_forwards_other = model.num_forwards - num_forwards
        again = await usage_of(engine, request(ALICE))
        assert [u.num_cached_prompt_tokens for u in (first, other, again)] == [0, 0, 4 * BLOCK_SIZE]
        assert num_forwards_other == num_forwards  # as many steps as if it were new: nor do timings tell
        assert engine.load().num_prefix_hit_tokens_total == 4 * BLOCK_SIZE


SALTS = ["", "bob", "tenant", "alice", "\x00bob", "salt\x00\x00\x00\x03\x00\x00\x00\x00\x00\x00\x00bob"]


@pytest.mark.parametrize("salt", SALTS)
async def test_no_salt_reaches_another_tenants_blocks(salt: str) -> None:
    async with serving() as (engine, _):
        await usage_of(engine, request(BOB))
        await usage_of(engine, request(BOB, cache_salt="alice"))
        await usage_of(engine, request(ANONYMOUS))
        usage = await usage_of(engine, request(ALICE, cache_salt=salt))
        assert usage.num_cached_prompt_tokens == 0


async def test_a_request_does_not_wait_for_a_prompt_that_another_tenant_computes() -> None:
    async with serving() as (engine, _):
        streams = [await engine.submit(request(identity)) for identity in (ALICE, BOB)]
        for stream in streams:
            last = (await read_all(stream))[-1]
            assert isinstance(last, FinishedEvent)
            assert last.usage.num_cached_prompt_tokens == 0


async def test_an_answers_last_block_is_continued_by_its_tenant_alone() -> None:
    async with serving() as (engine, _):
        events = await read_all(await engine.submit(request(ALICE)))
        said = [t.token_id for e in events for t in getattr(e, "tokens", ())]
        next_turn = GenerationRequest((*PROMPT, *said, 9, 9), SamplingParams(max_tokens=1), identity=BOB)
        assert (await usage_of(engine, next_turn)).num_cached_prompt_tokens == 0


async def test_prefixes_are_shared_among_all_where_that_is_chosen() -> None:
    async with serving(shares_prefixes=True) as (engine, _):
        await usage_of(engine, request(ALICE))
        assert (await usage_of(engine, request(BOB))).num_cached_prompt_tokens == 4 * BLOCK_SIZE


async def test_without_authentication_the_requests_own_tenant_divides_nothing() -> None:
    async with serving() as (engine, _):
        await usage_of(engine, request(ANONYMOUS, tenant="alice"))
        usage = await usage_of(engine, request(ANONYMOUS, tenant="bob"))
        assert usage.num_cached_prompt_tokens == 4 * BLOCK_SIZE


# --- limits --------------------------------------------------------------------------------


def limited(**limits: Any) -> Identity:
    return Identity("alice", limits=TenantLimits(**limits))


async def test_a_request_without_max_tokens_gets_the_tenants() -> None:
    async with serving() as (engine, _):
        for bound, given in ((5, 5), (500, 64 - len(PROMPT))):
            accepted, *_ = await read_all(await engine.submit(request(limited(max_tokens=bound), "", None)))
            assert isinstance(accepted, AcceptedEvent)
            assert accepted.max_tokens == given
        with pytest.raises(InvalidArgument, match="max_tokens: 6 is over 5"):
            await engine.submit(request(limited(max_tokens=5), "", 6))


async def test_tokens_a_minute_are_charged_by_what_was_used() -> None:
    caller = limited(tokens_per_minute=100)
    async with serving() as (engine, _):
        usage = await usage_of(engine, request(caller))
        used = usage.num_prompt_tokens + usage.num_output_tokens
        assert engine.tenants(1).tenants[0].tokens_left == 100 - used
        stream = await engine.submit(request(caller, "", 40))
        assert engine.tenants(1).tenants[0].tokens_left == 100 - used - len(PROMPT) - 40
        await stream.aclose()
        with pytest.raises(TenantLimitReached) as caught:
            await engine.submit(request(caller, "", 40))
        assert caught.value.limit == "tokens_per_minute"
        assert caught.value.retry_after_seconds > 0


async def test_texts_that_are_turned_to_ids_and_back_count_for_their_tenant() -> None:
    caller = limited(tokenized_per_minute=20)
    async with serving() as (engine, _):
        token_ids = await engine.tokenize("0 1 2 0 1 2", identity=caller)
        assert await engine.detokenize(token_ids, identity=caller)
        with pytest.raises(TenantLimitReached) as caught:
            await engine.tokenize("0 1 2 0 1 2", identity=caller)
        assert caught.value.limit == "tokenized_per_minute"
        with pytest.raises(TenantLimitReached):
            await engine.detokenize(tuple(range(20)), identity=caller)
        assert await engine.tokenize("0 1 2 0 1 2", identity=Identity("bob")) == token_ids


async def test_every_end_frees_what_was_held() -> None:
    caller = limited(max_concurrent_requests=1)
    async with serving() as (engine, model):
        await read_all(await engine.submit(request(caller)))
        with few_steps(model):
            stream = await engine.submit(request(caller, "again", 40))
            with pytest.raises(TenantLimitReached):
                await engine.submit(request(caller))
            with pytest.raises(DuplicateRequest):
                await engine.submit(request(caller, "again"))
            assert await engine.abort("again", tenant="alice") is AbortOutcome.ABORTED
        with pytest.raises(RequestAborted):
            await read_all(stream)
        with pytest.raises(InvalidArgument):
            await engine.submit(GenerationRequest("x" * 100, SamplingParams(max_tokens=500), identity=caller))
        assert engine.tenants(1).tenants[0].num_requests == 0
