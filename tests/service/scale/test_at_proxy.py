"""What our services add to Ray's gRPC proxy, on handlers of Ray's own: no call outlives its client."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.patience import until

from pageturner.service.client.credentials import DEADLINE_KEY
from pageturner.service.core.clock import Clock, ManualClock, MonotonicClock
from pageturner.service.errors import InvalidArgument, SlowConsumer
from pageturner.service.rpc.status import from_status
from pageturner.service.scale import at_proxy
from pageturner.service.scale.health import SERVICES
from pageturner.v1 import generation_pb2, generation_pb2_grpc

pytest.importorskip("ray", reason="the extra [ray] is not installed")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, of pydantic
    from ray.serve._private.grpc_util import gRPCGenericServer
    from ray.serve._private.proxy import gRPCProxy
    from ray.serve.handle import DeploymentResponseGenerator

STREAM = "/pageturner.v1.GenerationService/GenerateStream"


class Answer(DeploymentResponseGenerator):  # type: ignore[misc] # Ray's types are not read
    """Of an ingress, as its handle in the proxy has it."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.is_cancelled = False

    async def __anext__(self) -> Any:
        message = await self.messages.get()
        if message is None:
            raise StopAsyncIteration
        return Mock(), message

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled


class Proxy:
    """As much of Ray's as its handlers touch; routes and figures are left out."""

    request_timeout_s = None

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.metadata: list[dict[str, Any]] = []

    def proxy_request(self, proxy_request: Any) -> Any:
        self.metadata.append(dict(proxy_request.ray_serve_grpc_context.invocation_metadata()))
        return self._logged(proxy_request)

    async def _logged(self, proxy_request: Any) -> AsyncIterator[Any]:
        """Ray's log names the caller behind each call."""
        sent = gRPCProxy.send_request_to_replica(self, "id", "id", self, proxy_request)
        async for message in sent:
            yield message
        assert proxy_request.context.peer()

    def remote(self, argument: bytes) -> Answer:
        return self._answer

    def _setup_grpc_tracing(self, *_: object) -> None: ...

    def _finalize_grpc_tracing(self, *_: object) -> None: ...

    def handler(self, *, service_method: str, streaming_type: str) -> Callable[..., Any]:
        made: Callable[..., Any] = gRPCProxy.service_handler_factory(self, service_method, streaming_type)
        return made


class CallContext(Mock):
    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def trailing_metadata(self) -> tuple[()]:
        return ()


def handlers_of(proxy: Proxy, clock: Clock | None = None) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(Ray's handler of a stream, ours around one)."""
    names: dict[str, str] = {"service_method": STREAM, "streaming_type": "unary_stream"}
    return proxy.handler(**names), at_proxy._handler(proxy.handler, clock or MonotonicClock(), **names)


@pytest.mark.parametrize(("which", "is_noticed"), [(0, False), (1, True)], ids=["Ray's own", "ours"])
async def test_a_client_that_leaves_while_a_message_is_written_ends_its_answer(
    which: int, is_noticed: bool
) -> None:
    """gRPC drops a handler whose write was cancelled, and asyncio closes it. Ray's own is here for what it
    misses: once it does not, ours is needed no more."""
    answer = Answer()
    handle = handlers_of(Proxy(answer))[which]
    answer.messages.put_nowait(b"first")
    stream = handle(b"", CallContext())
    assert await anext(stream) == b"first"
    await stream.aclose()
    for _ in range(5):
        await asyncio.sleep(0)
    assert answer.is_cancelled is is_noticed


async def test_nothing_is_asked_of_a_call_that_is_over() -> None:
    """gRPC, asked for who called when it has freed that, ends Ray's proxy (SIGSEGV), with all its calls."""
    answer, context = Answer(), CallContext()
    _, handle = handlers_of(Proxy(answer))
    answer.messages.put_nowait(b"first")
    stream = handle(b"", context)
    await anext(stream)
    await stream.aclose()
    asked = len(context.mock_calls)
    await until(lambda: answer.is_cancelled)
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(context.mock_calls) == asked


async def test_a_client_that_leaves_before_the_first_message_ends_its_answer() -> None:
    answer = Answer()
    _, handle = handlers_of(Proxy(answer))
    waiting = asyncio.ensure_future(anext(handle(b"", CallContext())))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await until(lambda: answer.is_cancelled)


@pytest.mark.parametrize("is_last", [False, True])
async def test_an_answer_that_nobody_reads_is_ended_and_its_reader_told(is_last: bool) -> None:
    """is_last: the answer has ended where that is noticed."""
    answer, context, clock = Answer(), CallContext(), ManualClock()
    _, handle = handlers_of(Proxy(answer), clock)
    stream = handle(b"", context)
    for number in range(3):
        answer.messages.put_nowait(b"%d" % number)
    assert await anext(stream) == b"0"
    await until(answer.messages.empty)
    clock.advance(at_proxy.UNREAD_SECONDS - 1)
    answer.messages.put_nowait(b"3")
    await until(answer.messages.empty)
    clock.advance(1)
    answer.messages.put_nowait(b"too late")
    if is_last:
        answer.messages.put_nowait(None)
        await until(answer.messages.empty)
    else:
        await until(lambda: answer.is_cancelled)
    assert [message async for message in stream] == [b"1", b"2", b"3"]
    (code,), (trailers,) = context.set_code.call_args[0], context.set_trailing_metadata.call_args[0]
    error = from_status(code, "", dict(trailers)["grpc-status-details-bin"])
    assert isinstance(error, SlowConsumer)


async def test_a_reader_that_reads_may_be_slow() -> None:
    answer, clock = Answer(), ManualClock()
    _, handle = handlers_of(Proxy(answer), clock)
    stream = handle(b"", CallContext())
    for _ in range(3):
        answer.messages.put_nowait(b"x")
        clock.advance(at_proxy.UNREAD_SECONDS)  # until it comes
        await anext(stream)
        clock.advance(at_proxy.UNREAD_SECONDS - 1)  # until it is read
    answer.messages.put_nowait(b"last")
    assert await anext(stream) == b"last"
    await stream.aclose()
    await until(lambda: answer.is_cancelled)


async def test_whole_answers_come_whole() -> None:
    answer = Answer()
    _, handle = handlers_of(Proxy(answer))
    for message in (b"1", b"2", b"", None):
        answer.messages.put_nowait(message)
    assert [message async for message in handle(b"", CallContext())] == [b"1", b"2", b""]
    assert not answer.is_cancelled


@asynccontextmanager
async def serving(proxy: Proxy) -> AsyncIterator[grpc.aio.Channel]:
    """Ray's server with all services, without the rest of its proxy."""
    server = gRPCGenericServer(proxy.handler)
    at_proxy.add_services(Mock(), server)
    assert server.service_handler_factory == proxy.handler, "what is added beside is as Ray makes it"
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def test_what_is_left_of_a_calls_time_goes_along_whoever_calls() -> None:
    answer = Answer()
    answer.messages.put_nowait(generation_pb2.GenerateStreamResponse(sequence_number=3).SerializeToString())
    answer.messages.put_nowait(None)
    proxy = Proxy(answer)
    async with serving(proxy) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.GenerateStreamRequest()
        call = stub.GenerateStream(request, timeout=60, metadata=((DEADLINE_KEY, "9000"), ("other", "x")))
        assert [each.sequence_number async for each in call] == [3]
        answer.messages.put_nowait(None)
        await stub.GenerateStream(request, metadata=((DEADLINE_KEY, "7"),)).code()
    timed, untimed = proxy.metadata
    assert 0 < float(timed[DEADLINE_KEY]) <= 60
    assert timed["other"] == "x"
    assert untimed[DEADLINE_KEY] == "7", "where gRPC knows of no limit the client's word stands"


@pytest.mark.parametrize("streams", [True, False])
async def test_bytes_that_are_no_request_are_refused_as_by_one_server(streams: bool) -> None:
    proxy = Proxy(Answer())
    async with serving(proxy) as channel:
        raw: Any = channel
        if streams:
            call = raw.unary_stream(STREAM)(b"\xff\xfe garbage", timeout=60)
        else:
            call = raw.unary_unary(STREAM.replace("Stream", ""))(b"\xff\xfe garbage", timeout=60)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        packed = dict(await call.trailing_metadata())["grpc-status-details-bin"]
    error = from_status(grpc.StatusCode.INVALID_ARGUMENT, "", packed)
    assert isinstance(error, InvalidArgument)
    assert error.field == "request"
    assert not proxy.metadata, "no ingress was troubled"


async def test_every_service_is_there() -> None:
    answer = Answer()
    async with serving(Proxy(answer)) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call] # has no types
        call = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
        message = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        answer.messages.put_nowait(message.SerializeToString())
        assert await call.read() == message
        call.cancel()
        await until(lambda: answer.is_cancelled)
    recorder = Mock()
    at_proxy.add_services(Mock(), recorder)
    added = [call.args[0] for call in recorder.add_generic_rpc_handlers.call_args_list]
    assert {handler.service_name() for (handler,) in added} == SERVICES
