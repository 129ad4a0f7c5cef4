"""A call that ends early, by client or server and in any phase, aborts its request in the engine."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, suppress
from typing import Any

import grpc
import pytest
from support import http2
from support.fake_engine import PAUSE, FakeEngine, FakeStream, Step, accepted, echo, finished
from support.serving import serving

from pageturner.service.client import AcceptedEvent, Client, TokenEvent
from pageturner.service.core.outputs import SampledToken
from pageturner.service.engine.api import GenerationRequest
from pageturner.service.errors import DeadlineExceeded, PageturnerError, SlowConsumer
from pageturner.service.rpc import write_watch
from pageturner.v1 import generation_pb2 as pb
from pageturner.v1.generation_pb2_grpc import GenerationServiceStub

PHASES = ("submitting", "queued", "accepted", "streaming", "last")
CALLS = ("Generate", "GenerateStream")


def _pausing(phase: str) -> FakeEngine:
    """An engine that stands still in one phase of every request."""

    def script(request: GenerationRequest, token_ids: tuple[int, ...]) -> list[Step]:
        steps = list(echo(request, token_ids))
        steps.insert({"queued": 0, "accepted": 1, "streaming": 3, "last": len(steps) - 1}[phase], PAUSE)
        return steps

    engine = FakeEngine(script if phase != "submitting" else echo)
    engine.hold_submits = phase == "submitting"
    return engine


async def _run(client: Client, call: str, request_id: str, timeout_seconds: float = 60) -> None:
    if call == "Generate":
        await client.generate("ab", request_id=request_id, timeout_seconds=timeout_seconds)
    else:
        stream = client.stream("ab", request_id=request_id, timeout_seconds=timeout_seconds)
        _ = [item async for item in stream]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("phase", PHASES)
async def test_vllm_54947_atom_1562_a_cancelled_call_is_aborted(phase: str, call: str) -> None:
    """sglang#36475 too: in no phase does it harm the next call."""
    engine = _pausing(phase)
    async with serving(engine) as served:
        task = asyncio.create_task(_run(served.client, call, "r"))
        await engine.reached("submitting r" if phase == "submitting" else "paused r")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.reached("aborted r")
        assert engine.live == {}
        assert engine.aborts == ["r"], "once"
        engine.hold_submits, engine.script = False, echo
        assert (await served.client.generate("ab", request_id="r")).text == "abab", "the id is free again"
    [code] = {
        key[1]
        for key, _ in served.metrics.snapshot().grpc_server_handled_total.items()
        if key[0].grpc_method == call
    } - {"OK"}
    assert code == "CANCELLED"


async def test_a_deadline_aborts_in_every_phase() -> None:
    """All at once, as each waits for its deadline. One that passed before the call came is no test of it."""

    async def run(phase: str, call: str) -> None:
        engine, seconds = _pausing(phase), 0.5
        async with serving(engine) as served:
            while not engine.requests:
                seconds *= 2
                with pytest.raises(DeadlineExceeded):
                    await _run(served.client, call, f"r{seconds}", timeout_seconds=seconds)
            await engine.reached(f"aborted {engine.requests[0].request_id}")
            assert engine.live == {}
            await served.client.load()  # a whole call later the first one is in the log
            entry = next(entry for entry in served.log.entries if entry.get("method") == call)
            assert entry["peer"].startswith("ipv4:127.0.0.1")
        limit = engine.requests[0].deadline_seconds
        assert limit is not None
        assert 0 < limit < 1.1 * seconds, "the scheduler was told, give or take gRPC's rounding"

    await asyncio.gather(*itertools.starmap(run, itertools.product(PHASES, CALLS)))


async def test_a_deadline_that_the_engine_notices_first_has_the_same_status() -> None:
    engine = FakeEngine(lambda s, t: [accepted(s, t), DeadlineExceeded("the request's time is over")])
    async with serving(engine) as served:
        for call in CALLS:
            with pytest.raises(DeadlineExceeded, match="time is over"):
                await _run(served.client, call, call)


async def test_leaving_a_stream_at_any_message_aborts_it() -> None:
    """The scripted request has 3 + 2 x 6 messages; the client leaves after each count of them."""
    engine = FakeEngine(lambda s, t: [*list(echo(s, t))[:-1], PAUSE, finished(s, 2, 12)])
    async with serving(engine) as served:
        for count in range(1, 15):
            request_id = f"after-{count}"
            stream = served.client.stream("ab", request_id=request_id, n=2, max_tokens=6)
            async with aclosing(stream) as items:
                for _ in range(count):
                    await anext(items)
            await engine.reached(f"aborted {request_id}")
            await engine.reached(f"closed {request_id}")
        assert engine.live == {}
        assert len(engine.aborts) == 14


async def test_grpc_36193_a_request_that_ends_by_itself_is_not_aborted() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        for call in CALLS:
            await _run(served.client, call, call)
            await engine.reached(f"closed {call}")
    assert engine.aborts == []


async def test_grpc_43360_34843_cancelled_streams_leave_nothing_behind() -> None:
    """Not one stream of 200, nor one task."""
    engine = _pausing("streaming")
    streams: list[weakref.ref[FakeStream]] = []
    async with serving(engine) as served:
        num_tasks = len(asyncio.all_tasks())
        for i in range(200):
            async with aclosing(served.client.stream("ab", request_id=f"r{i}")) as items:
                assert isinstance(await anext(items), AcceptedEvent)
                await engine.reached(f"paused r{i}")
                streams.append(weakref.ref(engine.live[f"r{i}"]))
            await engine.reached(f"closed r{i}")
        await served.client.load()  # a whole call later, the handlers of all the others are gone
        gc.collect()
        assert engine.live == {}
        assert [stream for stream in streams if stream() is not None] == []
        assert len(asyncio.all_tasks()) < num_tasks + 10, "gRPC keeps a few of its own, not one a stream"


def _endless(request: GenerationRequest, token_ids: tuple[int, ...]) -> Iterator[Step]:
    yield accepted(request, token_ids)
    for _ in range(100_000):
        yield TokenEvent(request.request_id, 0, (SampledToken(97),), "x" * 65536)


async def _until_writes_block(client: Client, stream: FakeStream) -> int:
    """The stream stands still when 20 whole calls in a row saw it take nothing."""
    seen, still = stream.num_taken, 0
    for _ in range(20_000):
        await client.load()
        seen, still = (seen, still + 1) if stream.num_taken == seen else (stream.num_taken, 0)
        if still == 20:
            return seen
    raise AssertionError("a client that does not read was sent everything")


async def test_a_client_that_does_not_read_holds_only_itself_up() -> None:
    """HTTP/2 flow control stops the handler; a cancellation reaches it in the middle of a write."""
    engine = FakeEngine(_endless)
    async with serving(engine) as served:
        request = pb.GenerateStreamRequest(request_id="slow", prompt=pb.Prompt(text="x"))
        call = GenerationServiceStub(served.channel).GenerateStream(request)
        assert (await call.read()) is not grpc.aio.EOF
        num_taken = await _until_writes_block(served.client, engine.live["slow"])
        assert num_taken < 1000, "64 MB lie between client and server"
        engine.script = echo
        assert (await served.client.generate("ab")).text == "abab", "others go on"
        call.cancel()
        await engine.reached("aborted slow")
        await engine.reached("closed slow")
        assert engine.live == {}


async def _rest(call: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
    """What is left of a call whose first messages were read one by one."""
    while (message := await call.read()) is not grpc.aio.EOF:
        yield message


async def test_a_reader_that_stopped_is_given_up_and_its_id_is_free_again() -> None:
    """Whatever the engine says of it: a write to a client whose window is shut does not return."""
    engine = FakeEngine(_endless)
    async with serving(engine, write_timeout_seconds=0.05) as served:
        request = pb.GenerateStreamRequest(request_id="slow", prompt=pb.Prompt(text="x"))
        call = GenerationServiceStub(served.channel).GenerateStream(request)
        await call.read()
        await engine.reached("aborted slow")
        await engine.reached("closed slow")
        engine.script = echo
        assert (await served.client.generate("again", request_id="slow")).text == "agai"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [message async for message in _rest(call)]
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == "the stream was not read for 0.05 s"


@pytest.mark.fault("X")
async def test_a_first_write_that_is_late_ends_the_call_at_its_client_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A write that was cancelled may have sent the headers: a status that sends them again would be lost."""
    monkeypatch.setattr(write_watch, "NUM_LOOKS", 0.5)  # so that one look finds a write late on any machine
    async with serving(FakeEngine(echo), write_timeout_seconds=1e-9) as served:
        codes: Counter[grpc.StatusCode] = Counter()
        for number in range(20):
            call = GenerationServiceStub(served.channel).GenerateStream(
                pb.GenerateStreamRequest(request_id=f"r{number}", prompt=pb.Prompt(text="ab"))
            )
            async with asyncio.timeout(20):
                with suppress(grpc.aio.AioRpcError):
                    _ = [message async for message in call]
                codes[await call.code()] += 1
        assert codes.keys() <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.OK}
        assert codes[grpc.StatusCode.RESOURCE_EXHAUSTED], "no write was late"


@pytest.mark.fault("U")
async def test_a_peer_that_fell_silent_is_left_when_a_ping_is_not_answered() -> None:
    """It reads on for TCP, and is nobody: no frame of it comes. gRPC by itself would wait for a minute."""
    engine = FakeEngine(lambda s, t: [accepted(s, t), PAUSE])
    async with serving(engine, keepalive_seconds=0.5, keepalive_timeout_seconds=0.5) as served:
        connection = await http2.Connection.open(f"127.0.0.1:{served.port}")
        await connection.hello()
        body = pb.GenerateStreamRequest(request_id="r", prompt=pb.Prompt(text="x")).SerializeToString()
        await connection.send(http2.call(1, "/pageturner.v1.GenerationService/GenerateStream", body))
        await engine.reached("paused r")
        await engine.reached("closed r")
        connection.close()


@pytest.mark.fault("V")
async def test_a_client_without_a_window_is_given_up_and_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It takes not even the first message, and answers nothing: its status cannot be sent."""
    engine = FakeEngine(_endless)
    async with serving(engine, write_timeout_seconds=0.05) as served:
        connection = await http2.Connection.open(f"127.0.0.1:{served.port}")
        await connection.hello((http2.INITIAL_WINDOW_SIZE, 0))
        body = pb.GenerateStreamRequest(request_id="slow", prompt=pb.Prompt(text="x")).SerializeToString()
        path = "/pageturner.v1.GenerationService/GenerateStream"
        await connection.send(http2.call(1, path, body))
        await engine.reached("closed slow")
        engine.script = echo
        assert (await served.client.generate("again", request_id="slow")).text == "agai"
        connection.close()
    assert "ExecuteBatchError" not in caplog.text
    entry = next(entry for entry in served.log.entries if entry.get("code") == "RESOURCE_EXHAUSTED")
    assert entry["request_id"] == "slow"


async def test_a_reader_too_slow_for_the_engine_learns_so_when_it_reads_on() -> None:
    engine = FakeEngine(
        lambda s, t: itertools.chain(itertools.islice(_endless(s, t), 4), [SlowConsumer("30 s unread")])
    )
    async with serving(engine) as served:
        stream = served.client.stream("x", request_id="slow")
        assert isinstance(await anext(stream), AcceptedEvent)
        await engine.reached("closed slow")
        for _ in range(3):
            assert isinstance(await anext(stream), TokenEvent)
        with pytest.raises(SlowConsumer, match="30 s unread"):
            await anext(stream)


async def test_one_abort_by_id_ends_a_call_with_all_its_choices() -> None:
    """vllm#14326: n = 4 is one request, and one abort."""
    engine = _pausing("streaming")
    async with serving(engine) as served:
        task = asyncio.create_task(served.client.generate("ab", request_id="r", n=4))
        await engine.reached("paused r")
        await served.client.abort("r")
        with pytest.raises(PageturnerError, match="aborted by id"):
            await task
        await engine.reached("closed r")
    assert engine.aborts == ["r"]
