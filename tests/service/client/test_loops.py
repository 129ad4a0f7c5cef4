"""One client object, whatever loop or thread a call comes from."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from support.fake_server import delta, serve

from pageturner.service.client import Client, TokenEvent
from pageturner.service.rpc.status import UnknownStatus
from pageturner.v1 import generation_pb2

pytestmark = pytest.mark.fault("31")


def one_token_and_then_nothing(
    request: generation_pb2.GenerateStreamRequest, context: grpc.ServicerContext
) -> Iterator[generation_pb2.GenerateStreamResponse]:
    """Until the client leaves."""
    ended = threading.Event()
    context.add_callback(ended.set)
    yield delta(1)
    ended.wait()


@contextmanager
def no_loop_complains(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    gc.collect()
    assert caplog.records == []


def test_a_client_made_before_any_loop_serves_one_loop_after_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serve() as server, no_loop_complains(caplog):
        client = Client(server.address)
        for _ in range(3):
            assert asyncio.run(client.model()).name == "fake"


def test_a_client_may_be_entered_in_one_loop_after_another() -> None:
    with serve() as server:
        client = Client(server.address)

        async def ask() -> str:
            async with client:
                return (await client.model()).name

        assert (asyncio.run(ask()), asyncio.run(ask())) == ("fake", "fake")


def test_a_client_made_in_a_plain_thread_serves_loops_of_other_threads() -> None:
    with serve() as server, ThreadPoolExecutor(1) as maker, ThreadPoolExecutor(4) as threads:
        client = maker.submit(Client, server.address).result()
        barrier = threading.Barrier(4)

        def ask() -> str:
            barrier.wait()
            return asyncio.run(client.model()).name

        names = [future.result() for future in [threads.submit(ask) for _ in range(4)]]
    assert names == ["fake"] * 4


def test_connections_of_loops_that_ended_are_let_go() -> None:
    with serve() as server:
        client = Client(server.address)
        for _ in range(5):
            asyncio.run(client.model())
        assert len(client._servers._connections[0]._channels) == 1
        asyncio.run(client.close())
        assert not client._servers._connections[0]._channels


async def test_a_closed_client_connects_anew() -> None:
    with serve() as server:
        client = Client(server.address)
        await client.model()
        await client.close()
        await client.close()
        assert (await client.model()).name == "fake"
        await client.close()


async def test_closing_ends_what_is_under_way_with_a_typed_error() -> None:
    with serve(one_token_and_then_nothing) as server:
        client = Client(server.address)
        events = client.stream("x")
        assert isinstance(await anext(events), TokenEvent)
        waiting = asyncio.ensure_future(anext(events))
        await client.model()
        await client.close()
        with pytest.raises(UnknownStatus, match="CANCELLED"):
            await waiting
        calling = asyncio.create_task(client.generate("x"))
        await client.model()
        await client.close()
        with pytest.raises(UnknownStatus):
            await calling


async def test_a_task_that_is_cancelled_is_cancelled() -> None:
    with serve(one_token_and_then_nothing) as server:
        client = Client(server.address)
        events = client.stream("x")
        await anext(events)
        task = asyncio.ensure_future(anext(events))
        await client.model()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.close()


def test_no_call_warns_of_a_loop_that_is_missing() -> None:
    """As a module that makes its client on import."""
    code = (
        "import asyncio\nfrom pageturner.service.client import NEVER, Client\n"
        "client = Client('127.0.0.1:1', retry=NEVER)\n"
        "try:\n    asyncio.run(client.model())\nexcept Exception as error:\n    print(type(error).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("UnknownStatus\n", "")
