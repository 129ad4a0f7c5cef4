"""A server's end in mid-stream, and servers that may write nowhere: each on a server of its own."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import grpc

from chaos.calling import GONE, OK, Answer, request, stream
from chaos.faults.kind import Fault
from chaos.server import ServerProcess, running
from chaos.site import PLAIN_CHANNEL, PROMPTS, Site
from pageturner.v1.generation_pb2_grpc import GenerationServiceStub

NUM_STREAMS = 8
END_SECONDS = 120.0


@asynccontextmanager
async def _in_mid_stream(
    site: Site, folder: Path, may_end: frozenset[str]
) -> AsyncIterator[tuple[ServerProcess, list[asyncio.Task[Answer]]]]:
    """A server with streams, all of which have had a token; on leaving, each must have ended as it may."""
    async with (
        running(site.model, folder) as server,
        grpc.aio.insecure_channel(server.target, options=PLAIN_CHANNEL) as channel,
    ):
        stub = GenerationServiceStub(channel)
        num_started = 0
        all_run = asyncio.Event()

        async def note_start(answer: Answer) -> None:
            nonlocal num_started
            if answer.num_messages == 2:
                num_started += 1
                if num_started == NUM_STREAMS:
                    all_run.set()

        tasks = [
            asyncio.create_task(
                stream(
                    stub,
                    site.ledger,
                    request(site.ledger.new_id("life"), PROMPTS[0], max_tokens=length),
                    may_end,
                    on_message=note_start,
                )
            )
            for length in [40] * (NUM_STREAMS // 2) + [3500] * (NUM_STREAMS // 2)
        ]
        try:
            async with asyncio.timeout(END_SECONDS):
                await all_run.wait()
        except TimeoutError:
            ends = [task.result() for task in tasks if task.done()]
            site.ledger.problem(f"{num_started} of {NUM_STREAMS} streams began; ended: {ends}")
        yield server, tasks
        await asyncio.gather(*tasks)


async def sigterm(site: Site, random: Random) -> None:
    """A drain: what ends in time ends well, the rest with UNAVAILABLE, and the process with 0."""
    with tempfile.TemporaryDirectory(dir=site.folder) as folder:
        async with _in_mid_stream(site, Path(folder), OK | GONE) as (server, _):
            server.signal(signal.SIGTERM)
            code = await server.wait(END_SECONDS)
            if code != 0:
                site.ledger.problem(f"SIGTERM: the server ended with {code}")
        server.check_log(site.ledger)


async def kill(site: Site, random: Random) -> None:
    """SIGKILL: every stream ends with UNAVAILABLE, at once, by the connection."""
    with tempfile.TemporaryDirectory(dir=site.folder) as folder:
        async with _in_mid_stream(site, Path(folder), OK | GONE) as (server, tasks):
            server.signal(signal.SIGKILL)
            await asyncio.gather(*tasks)
        if all(task.result().code == "OK" for task in tasks):
            site.ledger.problem("SIGKILL came too late: no stream was running")


WRITE_NOTHING = ("sh", "-c", 'ulimit -f 2 && exec "$@"', "sh")
"""Of any file no more than a kilobyte, as on a full disk."""


async def full_disk(site: Site, random: Random) -> None:
    """The log goes to a full device, and no file may grow, those of the cache among them: served as ever."""
    with tempfile.TemporaryDirectory(dir=site.folder) as name:
        folder = Path(name)
        async with (
            running(
                site.model,
                folder,
                environment={"XDG_CACHE_HOME": name},
                wrapper=WRITE_NOTHING,
                log=Path("/dev/full"),
            ) as server,
            grpc.aio.insecure_channel(server.target, options=PLAIN_CHANNEL) as channel,
        ):
            stub = GenerationServiceStub(channel)
            for _ in range(3):
                asked = request(site.ledger.new_id("full"), PROMPTS[0], max_tokens=5)
                await stream(stub, site.ledger, asked)
            server.signal(signal.SIGTERM)
            code = await server.wait(END_SECONDS)
            if code != 0:
                site.ledger.problem(f"a full disk: the server ended with {code}")


LIVES: Mapping[str, Fault] = {
    "SIGTERM in mid-stream": sigterm,
    "kill -9 in mid-stream": kill,
    "a full disk": full_disk,
}
