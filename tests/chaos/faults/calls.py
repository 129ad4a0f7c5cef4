"""Calls that are left, late, too many, or ended by another."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from random import Random

import grpc
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from chaos.calling import ABORTED, DEADLINE, LEFT, OK, REFUSED, Answer, request, stream
from chaos.faults.kind import Fault
from chaos.site import PROMPTS, Site
from pageturner.v1 import generation_pb2 as pb

NUM_CALLS = 12


async def cancel_streams(site: Site, random: Random) -> None:
    """Left before the first message, in the middle, or at the end; up to four choices."""

    async def one(last: int, n: int, seconds: float) -> None:
        async def leave(answer: Answer) -> bool:
            return answer.num_messages >= last

        asked = request(site.ledger.new_id("cancel"), random.choice(PROMPTS), max_tokens=60, n=n)
        call = stream(site.stub, site.ledger, asked, OK | LEFT | REFUSED, on_message=leave)
        if last:
            await call
            return
        task = asyncio.create_task(call)
        await asyncio.sleep(seconds)  # the moment of leaving is the fault itself
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    site.tolerate(REFUSED)
    await asyncio.gather(
        *(
            one(random.choice((0, 1, 2, 5, 20, 50)), random.choice((1, 1, 4)), random.random() * 0.05)
            for _ in range(NUM_CALLS)
        )
    )


async def cancel_unary_calls(site: Site, random: Random) -> None:
    """A whole answer is asked for, and its client leaves meanwhile."""

    async def one(seconds: float) -> None:
        asked = pb.GenerateRequest(
            request_id=site.ledger.new_id("unary"),
            prompt=pb.Prompt(token_ids=pb.TokenIds(ids=PROMPTS[0])),
            sampling=pb.SamplingParams(max_tokens=200, ignore_eos=True),
        )
        site.ledger.num_requests += 1
        call = site.stub.Generate(asked)
        await asyncio.sleep(seconds)  # the moment of leaving is the fault itself
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    site.tolerate(REFUSED)
    await asyncio.gather(*(one(random.random() * 0.2) for _ in range(NUM_CALLS)))


async def short_deadlines(site: Site, random: Random) -> None:
    """From 0 ms up: each ends in time or by its deadline."""

    async def one(seconds: float) -> None:
        asked = request(site.ledger.new_id("deadline"), random.choice(PROMPTS), max_tokens=100)
        await stream(site.stub, site.ledger, asked, OK | DEADLINE | REFUSED, timeout=seconds)

    choices = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
    site.tolerate(REFUSED)
    await asyncio.gather(*(one(random.choice(choices)) for _ in range(NUM_CALLS)))


async def abort_by_id(site: Site, random: Random) -> None:
    """From a second client, at any moment and more than once; unknown ids among them."""

    async def one() -> None:
        asked = request(site.ledger.new_id("abort"), PROMPTS[1], max_tokens=300)
        task = asyncio.create_task(stream(site.stub, site.ledger, asked, OK | ABORTED | REFUSED))
        await asyncio.sleep(random.random() * 0.1)  # the moment of the abort is the fault itself
        ids = [asked.request_id, "never-was", asked.request_id]
        await site.stub.Abort(pb.AbortRequest(request_ids=ids))
        await task

    site.tolerate(REFUSED)
    await asyncio.gather(*(one() for _ in range(NUM_CALLS)))


async def flood(site: Site, random: Random) -> None:
    """Far over the bounds: each is answered whole, or refused at once and told when to come back."""
    refused: list[pb.GenerateStreamRequest] = []

    async def one() -> None:
        asked = request(site.ledger.new_id("flood"), random.choice(PROMPTS), max_tokens=random.randint(1, 20))
        answer = await stream(site.stub, site.ledger, asked, OK | REFUSED)
        if answer.code != "OK":
            refused.append(asked)

    site.tolerate(REFUSED)
    # Where other programs slow this process down, its calls come no faster than the server answers them.
    for _ in range(5):
        await asyncio.gather(*(one() for _ in range(200)), _refusal_tells_when(site))
        if refused:
            return
    site.ledger.problem("flood: five times 200 calls at once, and none was refused")


async def _refusal_tells_when(site: Site) -> None:
    """A refusal that is met, if one is, carries a RetryInfo."""
    asked = request(site.ledger.new_id("flood"), PROMPTS[0], max_tokens=1)
    site.ledger.num_requests += 1
    try:
        async for _ in site.stub.GenerateStream(asked):
            pass
    except grpc.aio.AioRpcError as error:
        trailers = dict(error.trailing_metadata() or ())
        status = Status.FromString(bytes(trailers.get("grpc-status-details-bin", b"")))
        if not any(RetryInfo.DESCRIPTOR.full_name in detail.type_url for detail in status.details):
            site.ledger.problem(f"flood: a refusal without RetryInfo: {error.details()}")


async def twins(site: Site, random: Random) -> None:
    """One id for many calls: one of them lives at a time, the rest are refused."""
    request_id = site.ledger.new_id("twin")
    asked = request(request_id, PROMPTS[2], max_tokens=30)
    may_end = OK | REFUSED | frozenset({"ALREADY_EXISTS"})
    site.tolerate(REFUSED)
    await asyncio.gather(*(stream(site.stub, site.ledger, asked, may_end) for _ in range(8)))


FAULTS: Mapping[str, Fault] = {
    "streams cancelled": cancel_streams,
    "unary calls cancelled": cancel_unary_calls,
    "deadlines from 0 ms": short_deadlines,
    "aborts by id": abort_by_id,
    "flood over the bounds": flood,
    "one id for many calls": twins,
}
