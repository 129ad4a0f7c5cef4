"""Clients of an application on a Ray of the test's own, and what they compare its answers with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pageturner.service.client import ChatMessage, Client, Retry, TokenEvent
from pageturner.service.llm import LLM
from support.ray_application import RayApplication

MODEL = {"deterministic": True}
CACHE = {"num_blocks": 2048, "swap_space": 0}
SCHEDULER = {"max_num_seqs": 8, "max_waiting": 8}
PATIENT = Retry(max_attempts=200, longest_wait_seconds=0.5)
ANSWER: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True, "temperature": 0.0}
TURN: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.0}


def arguments(folder: Path, scale: dict[str, Any], **cache: object) -> dict[str, Any]:
    return {
        "model": MODEL | {"source": str(folder)},
        "cache": CACHE | cache,
        "scheduler": SCHEDULER,
        "scale": {"num_cpus": 1, "report_seconds": 0.2, "drain_seconds": 30.0} | scale,
    }


@asynccontextmanager
async def client_of(application: RayApplication, retry: Retry = PATIENT) -> AsyncIterator[Client]:
    async with Client(application.target, retry=retry) as client:
        await client.wait_until_serving(60)
        yield client


async def until(holds: Callable[[], bool] | Callable[[], Awaitable[bool]], what: str, seconds: float) -> None:
    """For what other processes do in their own time."""
    ends_at = time.monotonic() + seconds
    while True:
        found = holds()
        if await found if isinstance(found, Awaitable) else found:
            return
        assert time.monotonic() < ends_at, f"never: {what}"
        await asyncio.sleep(0.1)


class Streams:
    """Answers that are being read, and how far each has come."""

    def __init__(self, client: Client, prompts: list[str], options: dict[str, Any]) -> None:
        self.num_tokens = [0] * len(prompts)
        self.num_resumes = 0
        self._tasks = [
            asyncio.create_task(self._read(client, position, prompt, options))
            for position, prompt in enumerate(prompts)
        ]

    async def _read(self, client: Client, position: int, prompt: str, options: dict[str, Any]) -> str:
        texts = []
        async with client.stream(prompt, **options) as events:
            async for event in events:
                if isinstance(event, TokenEvent):
                    texts.append(event.text)
                    self.num_tokens[position] += len(event.tokens)
            self.num_resumes += events.num_resumes
        return "".join(texts)

    async def texts(self) -> list[str]:
        return list(await asyncio.gather(*self._tasks))


def expected(truth: LLM, prompts: list[str], options: dict[str, Any]) -> list[str]:
    return [each.text for each in truth.generate(prompts, **options)]


class Load:
    """Clients that ask one thing after another, and compare each answer with the truth."""

    def __init__(self, client: Client, truth: LLM, num_clients: int) -> None:
        self.num_right = 0
        self._prompts = [f"Load {number}: " + "The quick brown fox jumps. " * 12 for number in range(8)]
        self._texts = expected(truth, self._prompts, TURN)
        self._is_over = False
        self._tasks = [asyncio.create_task(self._ask(client, number)) for number in range(num_clients)]

    async def _ask(self, client: Client, number: int) -> None:
        while not self._is_over:
            which = number % len(self._prompts)
            (text,) = await Streams(client, [self._prompts[which]], TURN).texts()
            assert text == self._texts[which]
            self.num_right += 1
            number += 3

    async def end(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)


async def chats_return_to_where_their_prefix_is(
    application: RayApplication, num_chats: int = 24, block_size: int = 16
) -> float:
    """The share of second turns that found all full blocks of the turn before."""
    num_found = 0
    async with client_of(application) as client:

        async def chat(number: int) -> bool:
            turns = [ChatMessage("user", f"Chat {number}: def f(x): return x + {number} " * 24)]
            first = await client.generate(turns, request_id=f"chat-{number}", **TURN)
            turns += [ChatMessage("assistant", first.text), ChatMessage("user", "And then?")]
            second = await client.generate(turns, **TURN)
            whole = first.usage.num_prompt_tokens // block_size * block_size
            return second.usage.num_cached_prompt_tokens >= whole - block_size

        for start in range(0, num_chats, 4):  # a few at once, as they come
            num_found += sum(await asyncio.gather(*map(chat, range(start, start + 4))))
    return num_found / num_chats
