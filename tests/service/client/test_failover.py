"""Servers that drain, die and come back under streams of the real engine; only the model is a fake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from support.fake_model import Stop, expected_tokens
from support.real_service import RealService, real_service

from pageturner.service.client import (
    NEVER,
    Client,
    Completion,
    FinishedEvent,
    Retried,
    Retry,
    SyncClient,
    TokenEvent,
)
from pageturner.service.client.values import CompletionBuilder

PROMPT = (1, 2, 0, 1)
MAX_TOKENS = 24


@asynccontextmanager
async def two_services() -> AsyncIterator[tuple[RealService, RealService]]:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(real_service(num_blocks=96))
        second = await stack.enter_async_context(real_service(num_blocks=96))
        yield first, second


async def read(client: Client, **options: Any) -> Completion:
    builder = CompletionBuilder()
    async for event in client.stream(PROMPT, max_tokens=MAX_TOKENS, **options):
        builder.add(event)
    return builder.build()


def check(answer: Completion, seed: int) -> None:
    for choice in answer.choices:
        found = [token.token_id for token in choice.tokens]
        assert found == expected_tokens(PROMPT, seed, choice.index, Stop(MAX_TOKENS))


async def test_streams_of_a_server_that_drains_go_on_elsewhere() -> None:
    async with two_services() as (first, second):
        told: list[Retried] = []
        first.hold_steps()
        async with Client([first.target, second.target], on_retry=told.append) as client:
            reading = [
                asyncio.create_task(read(client, seed=seed, n=1 + seed % 3, request_id=f"r{seed}"))
                for seed in range(8)
            ]
            await first.until(lambda: first.num_live == 8)
            await first.run_steps(6)
            await first.engine.drain(0.0)  # told to end before another step
            first.release_steps()
            answers = await asyncio.gather(*reading)
        await second.until_idle()
    for seed, answer in enumerate(answers):
        check(answer, seed)
        assert answer.usage.num_output_tokens == MAX_TOKENS * (1 + seed % 3)
    assert {retried.request_id for retried in told if retried.is_resumed} == {f"r{seed}" for seed in range(8)}
    assert any(answer.usage.num_resumed_tokens for answer in answers)


async def test_a_stream_outlasts_its_only_server_that_comes_back() -> None:
    """As one that is deployed anew: for a while nothing listens."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(real_service(num_blocks=96))
        port = int(first.target.rpartition(":")[2])
        waits: list[float] = []
        stopped = asyncio.Event()

        async def start_another(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                await stopped.wait()
                await stack.enter_async_context(real_service(num_blocks=96, server_options={"port": port}))
            await asyncio.sleep(0.02)  # gRPC itself waits between two tries to connect

        first.hold_steps()
        async with Client(first.target, retry=Retry(max_attempts=500), sleep=start_another) as client:
            reading = asyncio.create_task(read(client, seed=7))
            await first.until(lambda: first.num_live == 1)
            await first.run_steps(5)
            await first.engine.drain(0.0)  # told to end before another step
            first.release_steps()
            await first.server.stop()
            stopped.set()
            answer = await reading
    check(answer, 7)
    assert answer.usage.num_resumed_tokens
    assert len(waits) >= 3


async def test_the_sync_client_moves_over_alike() -> None:
    async with two_services() as (first, second):
        first.hold_steps()

        def read_all() -> tuple[list[int], int, int]:
            with SyncClient([first.target, second.target]) as client:
                with client.stream(PROMPT, max_tokens=MAX_TOKENS, seed=3) as events:
                    seen = list(events)
                tokens = [t.token_id for event in seen if isinstance(event, TokenEvent) for t in event.tokens]
                assert isinstance(seen[-1], FinishedEvent)
                return tokens, events.num_resumes, seen[-1].usage.num_output_tokens

        reading = asyncio.create_task(asyncio.to_thread(read_all))
        await first.until(lambda: first.num_live == 1)
        await first.run_steps(9)
        await first.engine.drain(0.0)
        first.release_steps()
        tokens, num_resumes, num_output_tokens = await reading
    assert tokens == expected_tokens(PROMPT, 3, 0, Stop(MAX_TOKENS))
    assert (num_resumes, num_output_tokens) == (1, MAX_TOKENS)


async def test_a_whole_answer_goes_on_elsewhere_too() -> None:
    async with two_services() as (first, second):
        first.hold_steps()
        told: list[Retried] = []
        async with Client([first.target, second.target], on_retry=told.append) as client:
            asking = asyncio.create_task(client.generate(PROMPT, max_tokens=MAX_TOKENS, seed=5, n=2))
            await first.until(lambda: first.num_live == 1)
            await first.run_steps(7)
            await first.engine.drain(0.0)
            first.release_steps()
            answer = await asking
    check(answer, 5)
    assert answer.usage.num_output_tokens == 2 * MAX_TOKENS
    assert answer.usage.num_resumed_tokens
    assert [retried.is_resumed for retried in told] == [True]
    assert second.metrics.snapshot().counters["requests_resumed_total"] == 1


async def test_an_only_server_or_a_client_that_resumes_nothing_is_asked_for_the_whole() -> None:
    async with two_services() as (first, second):
        for targets, retry in (([first.target], Retry()), ([first.target, second.target], NEVER)):
            async with Client(targets, retry=retry) as client:
                check(await client.generate(PROMPT, max_tokens=MAX_TOKENS, seed=5), 5)
        calls = first.metrics.snapshot().grpc_server_started_total
        assert {method.grpc_method: count for method, count in calls.items()} == {"Generate": 2}
