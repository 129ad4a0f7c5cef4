"""The client process of `bench streams`: opens many streams, reads each to its end, and counts.

Or leaves them unread, as clients do that hang, until it is told another line. Reads a `StreamTask` as a line
of JSON, prints "open" when every stream has been accepted, and at the end a `StreamCounts`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import cast

import grpc

from pageturner.service.bench.front_clients import METHOD
from pageturner.service.bench.overload_clients import reason_of
from pageturner.v1 import generation_pb2 as pb

Call = grpc.aio.UnaryStreamCall[pb.GenerateStreamRequest, pb.GenerateStreamResponse]

SMALL_WINDOW = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024),
)
"""Of a client whose reader hangs: little is read ahead, so that its server notices soon."""


@dataclass(frozen=True, slots=True)
class StreamTask:
    """streams: that are opened, over so many connections. is_read: or left alone."""

    streams: int
    connections: int
    output_tokens: int
    is_read: bool


@dataclass(slots=True)
class StreamCounts:
    """whole: streams that ended once, with all their tokens. faults: how many others, by what was wrong.

    A plain dict: before Python 3.12 `asdict` makes of a Counter one whose keys are pairs."""

    whole: int = 0
    faults: dict[str, int] = field(default_factory=dict)

    def fail(self, fault: str) -> None:
        """Count a stream with this fault."""
        self.faults[fault] = self.faults.get(fault, 0) + 1


async def run(
    target: str, task: StreamTask, on_open: Callable[[], object], may_leave: Callable[[], Awaitable[object]]
) -> StreamCounts:
    """Open all of the task's streams at once, and follow each to its end, or leave when it may."""
    counts, to_open = StreamCounts(), asyncio.Semaphore(0)
    options = () if task.is_read else SMALL_WINDOW

    async def follow(call: Call) -> None:
        await (_read(call, task, counts, to_open) if task.is_read else _hang(call, to_open))

    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(_channel(target, number, options))
            for number in range(task.connections)
        ]
        calls = [_call(channels[number % len(channels)], task) for number in range(task.streams)]
        tasks = [asyncio.ensure_future(follow(call)) for call in calls]
        for _ in tasks:
            await to_open.acquire()
        on_open()
        if not task.is_read:
            await may_leave()
        await asyncio.gather(*tasks)
    return counts


def _channel(target: str, number: int, options: tuple[tuple[str, int], ...]) -> grpc.aio.Channel:
    """A connection of its own: channels of equal arguments would share one."""
    return grpc.aio.insecure_channel(
        target, options=[("grpc.use_local_subchannel_pool", 1), ("pageturner.number", number), *options]
    )


def _call(channel: grpc.aio.Channel, task: StreamTask) -> Call:
    method = channel.unary_stream(
        METHOD,
        request_serializer=pb.GenerateStreamRequest.SerializeToString,
        response_deserializer=pb.GenerateStreamResponse.FromString,
    )
    sampling = pb.SamplingParams(max_tokens=task.output_tokens, ignore_eos=True)
    request = pb.GenerateStreamRequest(prompt=pb.Prompt(text="Once upon a time"), sampling=sampling)
    return cast(Call, method(request, wait_for_ready=True))


async def _read(call: Call, task: StreamTask, counts: StreamCounts, to_open: asyncio.Semaphore) -> None:
    seen: Counter[str] = Counter()
    num_tokens, is_open = 0, False
    try:
        async for message in cast(AsyncIterator[pb.GenerateStreamResponse], call):
            kind = message.WhichOneof("event") or "nothing"
            seen[kind] += 1
            num_tokens += len(message.delta.token_ids)
            if not is_open:
                is_open = True
                to_open.release()
    except grpc.aio.AioRpcError as error:
        seen[f"{reason_of(error)[0]}: {error.code().name}: {error.details()}"] += 1
    if not is_open:
        to_open.release()
    ends = (seen["accepted"], seen["finished"], num_tokens)
    if ends == (1, 1, task.output_tokens):
        counts.whole += 1
    else:
        counts.fail(str(dict(seen) | {"tokens": num_tokens}))


async def _hang(call: Call, to_open: asyncio.Semaphore) -> None:
    await call.initial_metadata()
    to_open.release()


async def _main(target: str) -> None:
    task = StreamTask(**json.loads(sys.stdin.readline()))

    def say(document: object) -> None:
        sys.stdout.write(json.dumps(document) + "\n")
        sys.stdout.flush()

    told = partial(asyncio.get_running_loop().run_in_executor, None, sys.stdin.readline)
    say(asdict(await run(target, task, lambda: say("open"), told)))


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    asyncio.run(_main(parser.parse_args().target))


if __name__ == "__main__":
    main()
