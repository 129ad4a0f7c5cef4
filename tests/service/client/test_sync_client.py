"""The client without an event loop: the answers of `Client`, from any thread, and no request left behind."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from types import FrameType
from typing import Any

import grpc
import pytest
from support.fake_engine import PAUSE, FakeEngine, accepted, finished
from support.fake_server import delta, serve
from support.serving import serving

from pageturner.policies.spec import PolicySpec
from pageturner.service.client import NEVER, AcceptedEvent, Client, FinishedEvent, SyncClient, TokenEvent
from pageturner.service.engine.api import AbortOutcome, EngineHealth
from pageturner.service.errors import DeadlineExceeded, InvalidArgument, ModelNotFound, QueueFull
from pageturner.service.rpc.status import UnknownStatus
from pageturner.v1 import generation_pb2

pytestmark = pytest.mark.fault("M")


def test_both_clients_have_the_same_methods_and_parameters() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(method).parameters)
            for name, method in vars(kind).items()
            if inspect.isfunction(method) and not name.startswith("_")
        }

    assert methods(SyncClient) == methods(Client)
    assert {"generate", "stream", "chat", "tokenize", "abort", "set_policies"} <= methods(SyncClient).keys()


CONVERSATION = [{"role": "user", "content": "a"}]


def ask_everything(target: str) -> list[Any]:
    with SyncClient(target) as client:
        client.wait_until_serving(60)
        return [
            client.generate("ab", max_tokens=3, n=2, logprobs=1, seed=5, request_id="r"),
            list(client.stream("ab", max_tokens=3, request_id="r")),
            list(client.chat(CONVERSATION, max_tokens=3, request_id="r")),
            client.tokenize("ab"),
            client.detokenize([97]),
            client.abort("r", "x"),
            client.models(),
            client.model("echo"),
            client.server_info(),
            client.policies(),
            client.set_policies({"queue": PolicySpec("priority")}),
            client.load(),
            client.flight_record(),
        ]


async def ask_everything_by_asyncio(target: str) -> list[Any]:
    async with Client(target) as client:
        await client.wait_until_serving(60)
        return [
            await client.generate("ab", max_tokens=3, n=2, logprobs=1, seed=5, request_id="r"),
            [event async for event in client.stream("ab", max_tokens=3, request_id="r")],
            [event async for event in client.chat(CONVERSATION, max_tokens=3, request_id="r")],
            await client.tokenize("ab"),
            await client.detokenize([97]),
            await client.abort("r", "x"),
            await client.models(),
            await client.model("echo"),
            await client.server_info(),
            await client.policies(),
            await client.set_policies({"queue": PolicySpec("priority")}),
            await client.load(),
            await client.flight_record(),
        ]


async def test_every_call_gives_what_the_asyncio_client_gives() -> None:
    async def served(ask: Callable[[str], Awaitable[list[Any]]]) -> list[Any]:
        engine = FakeEngine()
        engine.flight = b"x" * 1_000_000
        async with serving(engine) as server:
            return await ask(f"127.0.0.1:{server.port}")

    found = await served(lambda target: asyncio.to_thread(ask_everything, target))
    assert found == await served(ask_everything_by_asyncio)
    assert found[5] == {"r": AbortOutcome.ALREADY_FINISHED, "x": AbortOutcome.NOT_FOUND}


async def test_errors_are_those_that_the_server_meant() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        client = SyncClient(f"127.0.0.1:{served.port}")

        def refused(kind: type[Exception], **options: Any) -> Any:
            with pytest.raises(kind) as caught:
                client.generate("x", **options)
            return caught.value

        await asyncio.to_thread(refused, ModelNotFound, model="gpt")
        assert (await asyncio.to_thread(refused, InvalidArgument, top_p=3.0)).field == "sampling.top_p"
        engine.refusal = QueueFull("64 requests wait", 90.0)
        assert (await asyncio.to_thread(refused, QueueFull)).retry_after_seconds == 90.0
        engine.refusal = None
        engine.script = lambda request, ids: [accepted(request, ids), PAUSE]
        await asyncio.to_thread(refused, DeadlineExceeded, timeout_seconds=0.01)
        client.close()


async def test_a_stream_that_is_left_aborts_its_request_on_the_server() -> None:
    engine = FakeEngine(lambda request, ids: [accepted(request, ids), PAUSE, finished(request, 1, 0)])
    async with serving(engine) as served:
        client = SyncClient(f"127.0.0.1:{served.port}")

        def leave(how: str) -> None:
            if how == "closed":
                with closing(client.stream("x", request_id=how)) as events:
                    assert isinstance(next(events), AcceptedEvent)
            elif how == "broken":
                for _ in client.stream("x", request_id=how):
                    break  # nothing holds the generator any more
            else:
                events = client.stream("x", request_id=how)
                next(events)
                with pytest.raises(KeyboardInterrupt):
                    events.throw(KeyboardInterrupt)

        for how in ("closed", "broken", "interrupted"):
            await asyncio.to_thread(leave, how)
            await engine.reached(f"aborted {how}")
        client.close()


async def test_watching_the_load_and_waiting_for_health() -> None:
    engine = FakeEngine()
    engine.set_health(EngineHealth.STARTING)
    async with serving(engine, min_watch_seconds=0.001) as served:
        with SyncClient(f"127.0.0.1:{served.port}") as client:
            waiting = asyncio.create_task(asyncio.to_thread(client.wait_until_serving, 60))
            assert await asyncio.to_thread(next, client.watch_load(0.001)) == engine.stats
            engine.set_health(EngineHealth.SERVING)
            await waiting


def until_the_client_leaves(
    request: generation_pb2.GenerateStreamRequest, context: grpc.ServicerContext
) -> Iterator[generation_pb2.GenerateStreamResponse]:
    ended = threading.Event()
    context.add_callback(ended.set)
    yield delta(1)
    ended.wait()


def test_threads_share_one_client() -> None:
    with serve() as server, SyncClient(server.address) as client, ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda n: list(client.stream([n], max_tokens=n)), range(1, 33)))
    for number, events in enumerate(results, 1):
        assert len([event for event in events if isinstance(event, TokenEvent)]) == number
        assert isinstance(events[-1], FinishedEvent)


def interrupt_once_grpc_waits() -> None:
    """Ctrl-C, once the main thread is in gRPC's wait for a message."""
    main = threading.main_thread().ident
    assert main is not None
    while True:
        frame: FrameType | None = sys._current_frames()[main]
        while frame is not None:
            in_grpc = frame.f_code.co_filename.endswith("grpc/_channel.py")
            if in_grpc and frame.f_code.co_name in ("_next", "result"):
                signal.pthread_kill(main, signal.SIGINT)
                return
            frame = frame.f_back


def test_ctrl_c_ends_a_call_that_waits_and_its_request() -> None:
    with serve(until_the_client_leaves) as server, SyncClient(server.address) as client:
        events = client.stream("x")
        assert isinstance(next(events), TokenEvent)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(interrupt_once_grpc_waits)
            with pytest.raises(KeyboardInterrupt):
                next(events)
        # The server's handler has ended, or else leaving `serve` would wait for it.


def test_ctrl_c_ends_a_call_of_one_answer_and_its_request() -> None:
    port = Future[int]()

    async def serve_until_aborted() -> None:
        engine = FakeEngine(lambda request, ids: [accepted(request, ids), PAUSE])
        async with serving(engine) as served:
            port.set_result(served.port)
            await engine.reached("paused r")
            thread.submit(interrupt_once_grpc_waits)
            await engine.reached("aborted r")

    with ThreadPoolExecutor(2) as thread:
        server = thread.submit(asyncio.run, serve_until_aborted())
        with SyncClient(f"127.0.0.1:{port.result()}") as client, pytest.raises(KeyboardInterrupt):
            client.generate("x", request_id="r")
        server.result()


def test_a_closed_client_fails_what_is_under_way_and_connects_anew() -> None:
    with serve(until_the_client_leaves) as server, ThreadPoolExecutor(1) as thread:
        client = SyncClient(server.address)
        events = client.stream("x")
        next(events)
        waiting = thread.submit(next, events)
        client.close()
        with pytest.raises(UnknownStatus, match="CANCELLED"):
            waiting.result()
        assert client.model().name == "fake"
        client.close()
        client.close()


def test_a_client_that_is_closed_as_a_call_begins_fails_it_with_a_typed_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = SyncClient("127.0.0.1:1")
    connection = client._servers._connections[0]
    channel = connection._channel()
    monkeypatch.setattr(connection, "_channel", lambda: channel)
    channel.close()
    with pytest.raises(UnknownStatus, match="the client was closed"):
        client.load()
    with pytest.raises(UnknownStatus, match="the client was closed"):
        list(client.stream("x"))


def test_a_server_that_cannot_be_reached_is_a_typed_error() -> None:
    with SyncClient("127.0.0.1:1", retry=NEVER) as client:
        with pytest.raises(UnknownStatus, match="UNAVAILABLE"):
            client.generate("x")
        with pytest.raises(UnknownStatus, match="UNAVAILABLE"):
            list(client.stream("x"))
