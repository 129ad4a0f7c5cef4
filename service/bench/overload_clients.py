"""The client process of `bench overload`: sends requests at its own pace, whatever becomes of those before.

Reads a `Phase` as a line of JSON and answers with a list of `Outcome`s, until its standard input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import cast

import grpc

from pageturner.service.bench.front_clients import METHOD
from pageturner.service.rpc.status import from_status
from pageturner.v1 import generation_pb2 as pb

FIRST_TOKEN_ID, LAST_TOKEN_ID = 1000, 30000
"""Prompts are drawn from these ids, so that none shares a prefix with another."""
PATIENCE_SECONDS = 90.0
"""Deadline of requests that have none of their own: a measurement ends."""


@dataclass(frozen=True, slots=True)
class Phase:
    """seconds: requests are sent for so long, then those under way are waited for.

    rate: requests a second on average (a Poisson process), or with 0 a closed loop of `concurrency`. A burst
    is a closed loop of 0 seconds: `concurrency` requests at once; who is refused comes again, as it was told,
    up to `returns` times. deadline: of each, None for none.
    """

    seconds: float
    prompt_tokens: int
    output_tokens: int
    rate: float = 0.0
    concurrency: int = 0
    deadline: float | None = None
    seed: int = 0
    returns: int = 0


@dataclass(slots=True)
class Outcome:
    """One request. Seconds since the phase began; None where it did not happen.

    due, sent: when it was to be sent, and when it was. reason: of the error that ended it, as ErrorInfo says;
    empty if all went well. retry_seconds: that it was told to wait. attempt: of one client, in a closed loop.
    """

    due: float
    sent: float = 0.0
    accepted: float | None = None
    first: float | None = None
    ended: float = 0.0
    num_tokens: int = 0
    reason: str = ""
    retry_seconds: float | None = None
    attempt: int = 1

    @property
    def is_whole(self) -> bool:
        """It ended well."""
        return not self.reason

    @property
    def is_refused(self) -> bool:
        """It was turned away at the door."""
        return self.accepted is None and self.retry_seconds is not None


class Clients:
    """Requests over one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stream = channel.unary_stream(
            METHOD,
            request_serializer=pb.GenerateStreamRequest.SerializeToString,
            response_deserializer=pb.GenerateStreamResponse.FromString,
        )

    async def run(self, phase: Phase) -> list[Outcome]:
        """Send the phase's requests; what became of each."""
        random, began = Random(phase.seed), time.perf_counter()
        if phase.rate:
            return await self._open_loop(phase, random, began)
        loops = (self._closed_loop(phase, random, began) for _ in range(phase.concurrency))
        return [outcome for outcomes in await asyncio.gather(*loops) for outcome in outcomes]

    async def _open_loop(self, phase: Phase, random: Random, began: float) -> list[Outcome]:
        due, tasks = 0.0, []
        while (due := due + random.expovariate(phase.rate)) < phase.seconds:
            await asyncio.sleep(began + due - time.perf_counter())
            request = _request(phase, random)
            tasks.append(asyncio.create_task(self._ask(request, phase.deadline, due, began)))
        return list(await asyncio.gather(*tasks))

    async def _closed_loop(self, phase: Phase, random: Random, began: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        while True:
            due = time.perf_counter() - began
            outcome = await self._ask(_request(phase, random), phase.deadline, due, began)
            outcome.attempt = 1 + len(outcomes)
            outcomes.append(outcome)
            is_over = time.perf_counter() - began >= phase.seconds
            if is_over and not (outcome.is_refused and len(outcomes) <= phase.returns):
                return outcomes
            if outcome.retry_seconds:  # as it was told
                await asyncio.sleep(outcome.retry_seconds)

    async def _ask(
        self, request: pb.GenerateStreamRequest, deadline: float | None, due: float, began: float
    ) -> Outcome:
        outcome = Outcome(due, sent=time.perf_counter() - began)
        try:
            messages = self._stream(request, timeout=deadline or PATIENCE_SECONDS)
            async for message in cast(AsyncIterator[pb.GenerateStreamResponse], messages):
                at = time.perf_counter() - began
                if message.HasField("accepted"):
                    outcome.accepted = at
                elif message.HasField("delta"):
                    outcome.first = outcome.first or at
                    outcome.num_tokens += len(message.delta.token_ids)
        except grpc.aio.AioRpcError as error:
            outcome.reason, outcome.retry_seconds = reason_of(error)
        outcome.ended = time.perf_counter() - began
        return outcome


def _request(phase: Phase, random: Random) -> pb.GenerateStreamRequest:
    token_ids = [random.randrange(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(phase.prompt_tokens)]
    return pb.GenerateStreamRequest(
        prompt=pb.Prompt(token_ids=pb.TokenIds(ids=token_ids)),
        sampling=pb.SamplingParams(max_tokens=phase.output_tokens, ignore_eos=True),
    )


def reason_of(error: grpc.aio.AioRpcError) -> tuple[str, float | None]:
    """What ended a call, as counters name it, and after how many seconds to come again."""
    packed = [value for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin"]
    details = packed[0] if packed and isinstance(packed[0], bytes) else b""
    meant = from_status(error.code(), error.details() or "", details)
    return meant.counted_as, getattr(meant, "retry_after_seconds", None)


async def _serve(target: str) -> None:
    loop = asyncio.get_running_loop()
    async with grpc.aio.insecure_channel(target) as channel:
        clients = Clients(channel)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            outcomes = await clients.run(Phase(**json.loads(line)))
            sys.stdout.write(json.dumps([asdict(outcome) for outcome in outcomes]) + "\n")
            sys.stdout.flush()


def main(words: Sequence[str] | None = None) -> None:
    """The program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    asyncio.run(_serve(parser.parse_args(words).target))


if __name__ == "__main__":
    main()
