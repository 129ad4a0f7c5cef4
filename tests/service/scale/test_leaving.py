"""Nothing is computed for clients that left, or for an ingress that died, on a real Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import pytest
from support.model_folders import save_chat_model
from support.patience import PATIENCE_SECONDS
from support.ray_application import RayApplication, ray_application

from pageturner.service.client import Client, Retry
from pageturner.v1 import generation_pb2, generation_pb2_grpc

pytest.importorskip("ray", reason="the extra [ray] is not installed")

PATIENT = Retry(max_attempts=200, longest_wait_seconds=0.5)
MAX_TOKENS, TOKENS_OF_ONE_MISSED = 1900, 1500
"""Of each stream, and what one of them at least has before it when its client leaves."""


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await holds():  # noqa: ASYNC110  # what has no event
            await asyncio.sleep(0.1)


async def leave(application: RayApplication, number: int, shared: grpc.aio.Channel, draw: Random) -> None:
    """A client that goes before the first message, behind some, by its deadline, or with its connection."""
    own = grpc.aio.insecure_channel(application.target, options=(("grpc.use_local_subchannel_pool", 1),))
    stub = generation_pb2_grpc.GenerationServiceStub(own if number % 4 == 3 else shared)
    timeout = draw.uniform(0.05, 1.0) if number % 4 == 2 else None
    call = stub.GenerateStream(request(number), timeout=timeout)
    if number % 4 == 0:
        await asyncio.sleep(draw.uniform(0, 0.05))
    elif number % 4 == 2:
        assert await how_it_ends(call) is grpc.StatusCode.DEADLINE_EXCEEDED
    else:
        for _ in range(draw.randrange(1, 9)):
            await call.read()
    call.cancel()
    await own.close()


async def how_it_ends(call: Any) -> grpc.StatusCode:
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            continue
    code: grpc.StatusCode = await call.code()
    return code


def request(number: int) -> generation_pb2.GenerateStreamRequest:
    return generation_pb2.GenerateStreamRequest(
        prompt={"text": f"Leave {number}"},
        sampling={"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0.0},
    )


async def num_computed(client: Client) -> int:
    return (await client.load()).num_scheduled_tokens_total


async def is_idle(client: Client) -> bool:
    load = await client.load()
    return not load.num_running + load.num_waiting + load.num_swapped


async def clients_that_leave_end_their_requests(application: RayApplication, client: Client) -> None:
    draw, gate = Random(3), asyncio.Semaphore(24)
    async with grpc.aio.insecure_channel(application.target) as shared:

        async def one(number: int) -> None:
            async with gate:
                await leave(application, number, shared, draw)

        await asyncio.gather(*map(one, range(200)))
        before = await num_computed(client)
        await until(lambda: is_idle(client))
        assert await num_computed(client) - before < TOKENS_OF_ONE_MISSED
        assert not (await client.load()).num_blocks_used


async def what_a_dead_ingress_followed_is_ended(application: RayApplication, client: Client) -> None:
    before, num_streams = await num_computed(client), 16
    async with grpc.aio.insecure_channel(application.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        calls = [stub.GenerateStream(request(number)) for number in range(num_streams)]
        for call in calls:
            await call.read()
        application.kill_replica("Ingress")
        for call in calls:
            assert await how_it_ends(call) is not grpc.StatusCode.OK
    await until(lambda: is_idle(client))
    assert await num_computed(client) - before < num_streams * MAX_TOKENS


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nobody_is_computed_for_who_has_left(tmp_path: Path) -> None:
    async def check(application: RayApplication) -> None:
        async with Client(application.target, retry=PATIENT) as client:
            await client.wait_until_serving(PATIENCE_SECONDS)
            await clients_that_leave_end_their_requests(application, client)
            await what_a_dead_ingress_followed_is_ended(application, client)

    arguments = {
        "model": {"source": str(save_chat_model(tmp_path)), "deterministic": True},
        "cache": {"num_blocks": 8192, "swap_space": 0},
        "scheduler": {"max_num_seqs": 32, "max_waiting": 400},
        "scale": {"num_cpus": 1, "report_seconds": 0.2, "min_replicas": 2, "max_replicas": 2},
    }
    with TemporaryDirectory(prefix="ray-") as room, ray_application(Path(room), arguments) as application:
        asyncio.run(check(application))
