"""The client process of `bench front`: so many streams at once, each request followed by another.

Reads its prompts as one line of JSON, prints "begin" when the streams are warm and a `FrontWindow` as JSON
when the time is over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field

import grpc

from pageturner.service.client import Client, TokenEvent
from pageturner.v1 import generation_pb2 as pb

METHOD = "/pageturner.v1.GenerationService/GenerateStream"


@dataclass(slots=True)
class FrontWindow:
    """What came within the time measured. gaps: seconds between two messages of a stream with tokens.

    first_seconds: from sending a request to its first token. cpu_seconds: of this process.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    num_tokens: int = 0
    num_messages: int = 0
    gaps: list[float] = field(default_factory=list)
    first_seconds: list[float] = field(default_factory=list)


Counts = AsyncIterator[int]
Ask = Callable[[str], Counts]
"""One request for a prompt: the tokens of each message that brought some."""


def ask_by_library(client: Client, output_tokens: int) -> Ask:
    """As a program that uses the Python client."""

    async def ask(prompt: str) -> Counts:
        async with aclosing(client.stream(prompt, max_tokens=output_tokens, ignore_eos=True)) as events:
            async for event in events:
                if isinstance(event, TokenEvent):
                    yield len(event.tokens)

    return ask


def ask_by_stub(channel: grpc.aio.Channel, output_tokens: int) -> Ask:
    """As a program that was generated from the wire contract alone."""
    method = channel.unary_stream(
        METHOD,
        request_serializer=pb.GenerateStreamRequest.SerializeToString,
        response_deserializer=pb.GenerateStreamResponse.FromString,
    )

    async def ask(prompt: str) -> Counts:
        sampling = pb.SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        async for message in method(
            pb.GenerateStreamRequest(prompt=pb.Prompt(text=prompt), sampling=sampling)
        ):
            if message.HasField("delta"):
                yield len(message.delta.token_ids)

    return ask


async def measure(ask: Ask, prompts: Sequence[str], seconds: float, warm_up_seconds: float) -> FrontWindow:
    """Keep a stream a prompt going, and count for so long after the warm-up."""
    now = time.perf_counter
    window, is_open = FrontWindow(), False

    async def keep_asking(prompt: str) -> None:
        while True:
            last, is_first = now(), True
            async for num_tokens in ask(prompt):
                at = now()
                if is_open:
                    window.num_tokens += num_tokens
                    window.num_messages += 1
                    (window.first_seconds if is_first else window.gaps).append(at - last)
                last, is_first = at, False

    tasks = [asyncio.create_task(keep_asking(prompt)) for prompt in prompts]
    await asyncio.wait(tasks, timeout=warm_up_seconds, return_when=asyncio.FIRST_COMPLETED)
    sys.stdout.write(json.dumps("begin") + "\n")
    sys.stdout.flush()
    is_open, began_at, cpu_began = True, now(), time.process_time()
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    is_open = False
    window.seconds, window.cpu_seconds = now() - began_at, time.process_time() - cpu_began
    for task in tasks:
        if task.done():
            task.result()  # only a fault ends one
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return window


async def _run(arguments: argparse.Namespace) -> None:
    prompts = json.loads(sys.stdin.readline())
    if arguments.client == "library":
        async with Client(arguments.target) as client:
            ask = ask_by_library(client, arguments.output_tokens)
            window = await measure(ask, prompts, arguments.seconds, arguments.warm_up_seconds)
    else:
        async with grpc.aio.insecure_channel(arguments.target) as channel:
            ask = ask_by_stub(channel, arguments.output_tokens)
            window = await measure(ask, prompts, arguments.seconds, arguments.warm_up_seconds)
    sys.stdout.write(json.dumps(asdict(window)) + "\n")


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--client", choices=("library", "stub"), required=True)
    parser.add_argument("--output-tokens", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--warm-up-seconds", type=float, required=True)
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
