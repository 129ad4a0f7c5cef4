"""`pageturner bench handoff`: answers beside long prompts, on one server and with prefill apart.

Streams decode without end, while long prompts come one after the other. On one server each prompt takes steps
from the streams; apart, another process computes it, and hands its blocks over. Both have the same
processors: one server with all threads, or two servers with half of them each. In turns, as neighbours come
and go.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

from pageturner.service.bench.front import quantile
from pageturner.service.client import Client, TokenEvent
from pageturner.service.client.server_process import running_server

VOCABULARY = range(300, 1200)
"""Ids of which prompts are made: of any model, and no control tokens of the embedded one."""

ARRANGEMENTS = ("together", "apart")


@dataclass(frozen=True, slots=True)
class HandoffLoad:
    """num_streams decode; num_prompts of prompt_tokens come interval_seconds after one another, each for
    output_tokens."""

    num_streams: int = 8
    num_prompts: int = 8
    prompt_tokens: int = 1024
    output_tokens: int = 8
    interval_seconds: float = 1.0

    def prompt(self, number: int) -> tuple[int, ...]:
        """No two begin alike."""
        first, count = VOCABULARY.start, len(VOCABULARY)
        step = number % 89 + 2
        return tuple(first + (number * 7919 + place * step) % count for place in range(self.prompt_tokens))


@dataclass(frozen=True, slots=True)
class HandoffFigures:
    """Seconds: of a prompt's first token, and between two tokens of a stream while prompts came; None where
    there were none. tokens_per_second: of the streams. num_cached: prompt tokens that came from elsewhere."""

    first_token_p50: float
    first_token_p99: float
    gap_p50: float
    gap_p99: float
    gap_max: float
    tokens_per_second: float
    num_cached: int


@dataclass(slots=True)
class _Seen:
    gaps: list[float]
    num_tokens: int = 0


def measure_handoff(
    load: HandoffLoad,
    rounds: int,
    num_threads: int,
    arguments: Sequence[str],
    say: Callable[[str], None],
) -> dict[str, list[HandoffFigures]]:
    """By arrangement, a round each, in turns. arguments: flags of all servers. num_threads: of both
    together."""
    found: dict[str, list[HandoffFigures]] = {name: [] for name in ARRANGEMENTS}
    with ExitStack() as stack:
        targets = {
            "together": stack.enter_context(one_server(num_threads, arguments)),
            "apart": stack.enter_context(two_servers(num_threads, arguments)),
        }
        for number in range(rounds):
            for name, target in targets.items():
                figures = asyncio.run(measure(target, load, seed=number * len(targets) * load.num_prompts))
                found[name].append(figures)
                gap, first = figures.gap_p99 * 1000, figures.first_token_p50
                say(f"{name}: gaps p99 {gap:.0f} ms, first token {first:.2f} s")
    return found


@contextmanager
def one_server(num_threads: int, arguments: Sequence[str]) -> Iterator[str]:
    """Its target."""
    with running_server([*arguments, f"--num-threads={num_threads}"]) as server:
        yield server.target


@contextmanager
def two_servers(num_threads: int, arguments: Sequence[str]) -> Iterator[str]:
    """The target of the one that decodes."""
    half = [*arguments, f"--num-threads={max(1, num_threads // 2)}", "--host-cache-memory=512MiB"]
    with (
        running_server([*half, "--handover-role=prefill"]) as prefill,
        running_server(
            [*half, "--handover-role=decode", f"--handover-prefill-targets={prefill.target}"]
        ) as decode,
    ):
        yield decode.target


async def measure(target: str, load: HandoffLoad, seed: int) -> HandoffFigures:
    """One round. seed: tells its prompts from those of other rounds."""
    async with Client(target) as client:
        await client.generate(load.prompt(1 << 20)[:64], max_tokens=2)  # connections, kernels
        async with _decoding(client, load.num_streams) as seen:
            started = time.monotonic()
            before = seen.num_tokens
            seen.gaps.clear()
            waiting = []
            for number in range(load.num_prompts):
                asked = _ask(client, load.prompt(seed + number), load.output_tokens)
                waiting.append(asyncio.create_task(asked))
                await asyncio.sleep(load.interval_seconds)
            firsts = [await task for task in waiting]
            seconds, num_tokens = time.monotonic() - started, seen.num_tokens - before
            gaps = sorted(seen.gaps)
    times = sorted(first for first, _ in firsts)
    return HandoffFigures(
        quantile(times, 0.5),
        quantile(times, 0.99),
        quantile(gaps, 0.5),
        quantile(gaps, 0.99),
        gaps[-1],
        num_tokens / seconds,
        sum(cached for _, cached in firsts),
    )


async def _ask(client: Client, prompt: tuple[int, ...], max_tokens: int) -> tuple[float, int]:
    """Seconds to the first token, and how many of the prompt's were cached."""
    started, first, cached = time.monotonic(), 0.0, 0
    async for event in client.stream(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True):
        if isinstance(event, TokenEvent):
            first = first or time.monotonic() - started
        usage = getattr(event, "usage", None)
        if usage is not None:
            cached = usage.num_cached_prompt_tokens
    return first, cached


@asynccontextmanager
async def _decoding(client: Client, num_streams: int) -> AsyncIterator[_Seen]:
    """So many streams, once all of them have begun; they end on leaving."""
    seen, begun = _Seen([]), [asyncio.Event() for _ in range(num_streams)]
    tasks = [asyncio.create_task(_decode(client, number, seen, event)) for number, event in enumerate(begun)]
    try:
        for event in begun:
            await event.wait()
        yield seen
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _decode(client: Client, number: int, seen: _Seen, begun: asyncio.Event) -> None:
    while True:
        last = None
        prompt = tuple(VOCABULARY.start + number + place for place in range(8))
        async for event in client.stream(prompt, max_tokens=400, temperature=1.0, ignore_eos=True):
            if isinstance(event, TokenEvent):
                now = time.monotonic()
                if last is not None:
                    seen.gaps.append(now - last)
                last = now
                seen.num_tokens += len(event.tokens)
                begun.set()
