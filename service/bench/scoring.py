"""`pageturner bench scoring`: what log-probabilities of known tokens cost.

Prompts: one at a time, past the prefix cache, answered by one token; in turns plain, with prompt_logprobs 0
and 5. What they take more than a plain one is the head's product over all rows, where a plain prompt takes it
of its last, and what is made of the logits. Both are also timed apart, in this process (`scored_steps.py`).

Scores: one call of many continuations, alone; then one call behind the other beside streams, whose gaps
between tokens are compared with those of streams alone, and of streams beside plain prompts, one behind the
other: a chunk of a prompt is what a stream waits for in any case.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise

from pageturner.service.client import Client, TokenEvent
from pageturner.service.client.server_process import running_server

FIRST_TOKEN, NUM_TOKENS = 1000, 4000
"""Prompts are made of these tokens, none of which means anything to a model."""

KINDS: dict[str, int | None] = {"plain": None, "logprobs": 0, "top5": 5}


@dataclass(frozen=True, slots=True)
class ScoringLoad:
    """prompt_tokens: of prompts that are scored. continuations: of a call, each of continuation_tokens behind
    context_tokens. streams: beside which calls are made, each of stream_tokens."""

    prompt_tokens: int = 1024
    continuations: int = 64
    continuation_tokens: int = 16
    context_tokens: int = 256
    streams: int = 4
    stream_tokens: int = 96


@dataclass(frozen=True, slots=True)
class Gaps:
    """Seconds between two tokens of a stream."""

    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Gaps:
        ranked = sorted(seconds)
        return cls(ranked[len(ranked) // 2], ranked[len(ranked) * 99 // 100])


@dataclass(frozen=True, slots=True)
class ScoringResult:
    """prompts: seconds of each round, by kind. alone, beside_prompts, beside: gaps of streams by themselves,
    beside plain prompts, and beside calls. rate_alone, rate_beside: tokens that calls score a second."""

    load: ScoringLoad
    prompts: dict[str, tuple[float, ...]]
    alone: Gaps
    beside_prompts: Gaps
    beside: Gaps
    rate_alone: float
    rate_beside: float

    def ratio(self, kind: str) -> float:
        """The time of a prompt that is scored over that of a plain one."""
        return statistics.median(self.prompts[kind]) / statistics.median(self.prompts["plain"])


def measure_scoring(
    load: ScoringLoad, rounds: int, arguments: Sequence[str], say: Callable[[str], None]
) -> ScoringResult:
    """arguments: flags of the server. Raises PageturnerError if a request fails."""
    with running_server(arguments) as server:
        return asyncio.run(_measure(server.target, load, rounds, say))


async def _measure(target: str, load: ScoringLoad, rounds: int, say: Callable[[str], None]) -> ScoringResult:
    async with Client(target) as client:
        prompts = await _prompts(client, load, rounds, say)
        await _score(client, load, 0)
        alone: list[float] = []
        beside_prompts: list[float] = []
        beside: list[float] = []
        calls: list[float] = []
        calls_beside: list[float] = []
        for number in range(1, rounds + 1):
            alone += await _gaps(client, load, number)
            calls.append(await _score(client, load, number))
            async with _calls(lambda each: _prompt(client, load, each), number * 1000, []):
                beside_prompts += await _gaps(client, load, number)
            async with _calls(lambda each: _score(client, load, each), number * 1000, calls_beside):
                beside += await _gaps(client, load, number)
            say(f"round {number}: a call {calls[-1]:.2f} s alone, {calls_beside[-1]:.2f} s beside streams")
    num_scored = load.continuations * load.continuation_tokens
    return ScoringResult(
        load,
        prompts,
        Gaps.of(alone),
        Gaps.of(beside_prompts),
        Gaps.of(beside),
        num_scored / statistics.median(calls),
        num_scored / statistics.median(calls_beside),
    )


async def _prompts(
    client: Client, load: ScoringLoad, rounds: int, say: Callable[[str], None]
) -> dict[str, tuple[float, ...]]:
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        for kind, count in KINDS.items():
            taken = await _prompt(client, load, number, count)
            if number:  # the first is for whatever is done once
                seconds[kind].append(taken)
        if number:
            say(f"prompts, round {number}: {', '.join(f'{k} {s[-1]:.2f} s' for k, s in seconds.items())}")
    return {kind: tuple(each) for kind, each in seconds.items()}


async def _prompt(
    client: Client, load: ScoringLoad, number: int, prompt_logprobs: int | None = None
) -> float:
    """The seconds of one prompt that is answered by one token."""
    options = {} if prompt_logprobs is None else {"prompt_logprobs": prompt_logprobs}
    started = time.perf_counter()
    await client.generate(
        _tokens(number, load.prompt_tokens),
        max_tokens=1,
        temperature=0.0,
        bypass_prefix_cache=True,
        **options,  # type: ignore[arg-type] # one option by its name
    )
    return time.perf_counter() - started


async def _score(client: Client, load: ScoringLoad, number: int) -> float:
    """The seconds of one call."""
    started = time.perf_counter()
    await client.score(
        _tokens(number, load.context_tokens),
        [_tokens(number + 7 * each, load.continuation_tokens) for each in range(load.continuations)],
    )
    return time.perf_counter() - started


@asynccontextmanager
async def _calls(
    make: Callable[[int], Awaitable[float]], first: int, seconds: list[float]
) -> AsyncIterator[None]:
    """Calls, each told its number and telling its seconds, one behind the other, until the block is left; the
    last one ends."""
    is_over = False

    async def call() -> None:
        number = first
        while not is_over:
            number += 1
            seconds.append(await make(number))

    task = asyncio.create_task(call())
    try:
        yield
    finally:
        is_over = True
        await task


async def _gaps(client: Client, load: ScoringLoad, number: int) -> list[float]:
    """Seconds between the tokens of streams that run side by side, all of them prefilled."""

    async def read(index: int) -> list[float]:
        moments = []
        stream = client.stream(
            f"{index}. Write a story about the sea.",
            max_tokens=load.stream_tokens,
            ignore_eos=True,
            seed=number * load.streams + index,
        )
        async for event in stream:
            if isinstance(event, TokenEvent):
                moments += [time.perf_counter()] * len(event.tokens)
        return [later - earlier for earlier, later in pairwise(moments)]

    gaps = await asyncio.gather(*map(read, range(load.streams)))
    return [gap for each in gaps for gap in each]


def _tokens(number: int, count: int) -> list[int]:
    """Another list of tokens for each number."""
    return [FIRST_TOKEN + (number * 7919 + place * 31 + place * place) % NUM_TOKENS for place in range(count)]
