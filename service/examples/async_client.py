"""Many requests at once with asyncio, one of them left early.

pageturner serve                                        # in another terminal
python -m pageturner.service.examples.async_client [HOST:PORT|unix:PATH]
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing

from pageturner.service.client import DEFAULT_TARGET, Client, TokenEvent
from pageturner.service.errors import InvalidArgument, QueueFull

PROMPTS = ("Once upon a time", "The sea is", "def fibonacci(n):", "In the year 1969")


async def answer(client: Client, prompt: str) -> str:
    """The whole text; a full queue is waited for as long as the server says."""
    while True:
        try:
            return (await client.generate(prompt, max_tokens=16, temperature=0.0)).text
        except QueueFull as full:
            await asyncio.sleep(full.retry_after_seconds)


async def first_words(client: Client, prompt: str, count: int) -> str:
    """Leaving the stream ends the request on the server and frees its blocks."""
    text = ""
    async with aclosing(client.stream(prompt, max_tokens=1000)) as events:
        async for event in events:
            if isinstance(event, TokenEvent):
                text += event.text
            if len(text.split()) > count:
                break
    return text


async def main(target: str = DEFAULT_TARGET) -> None:
    async with Client(target) as client:
        await client.wait_until_serving(timeout_seconds=60)
        answers = await asyncio.gather(*(answer(client, prompt) for prompt in PROMPTS))
        for prompt, text in zip(PROMPTS, answers, strict=True):
            print(f"{prompt!r} -> {text!r}")
        print(f"left early: {await first_words(client, 'A long story:', 5)!r}")
        try:
            await client.generate("x", top_p=3.0)
        except InvalidArgument as error:
            print(f"refused: {error.field} {error.reason}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
