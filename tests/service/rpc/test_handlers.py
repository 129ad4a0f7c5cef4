"""Handlers and their interceptor without a network: what must have happened by the time they return.

Over a network a garbage collector would hide an abort that was never awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import grpc
import pytest
from support.fake_engine import PAUSE, FakeEngine, accepted, finished
from support.serving import capturing_logger

from pageturner.service.core.clock import ManualClock
from pageturner.service.engine.metrics import Metrics
from pageturner.service.identity import ANONYMOUS
from pageturner.service.rpc.callers import Gatekeeper, bind_caller
from pageturner.service.rpc.generation import GenerationServicer
from pageturner.service.rpc.interceptors import CallInterceptor
from pageturner.service.rpc.lifecycle import Lifecycle
from pageturner.service.rpc.options import ServerOptions
from pageturner.v1 import generation_pb2 as pb


class FakeContext:
    """As much of a ServicerContext as handlers use. write_error: raised by each write."""

    def __init__(self, remaining: float | None = None, write_error: BaseException | None = None) -> None:
        self.remaining = remaining
        self.write_error = write_error

    def time_remaining(self) -> float | None:
        return self.remaining

    def peer(self) -> str:
        return "nowhere"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def send_initial_metadata(self, metadata: object) -> None:
        """Headers need no room."""

    async def write(self, message: object) -> None:
        if self.write_error is not None:
            raise self.write_error


def _context(remaining: float | None = None, write_error: BaseException | None = None) -> Any:
    return FakeContext(remaining, write_error)


def _servicer(engine: FakeEngine) -> GenerationServicer:
    logger, _ = capturing_logger()
    lifecycle = Lifecycle()
    lifecycle.attach(engine)
    bind_caller(ANONYMOUS)
    return GenerationServicer(ServerOptions(), lifecycle, logger, lambda: "drawn")


def _request() -> pb.GenerateStreamRequest:
    return pb.GenerateStreamRequest(request_id="r", prompt=pb.Prompt(text="x"))


async def test_closing_a_stream_returns_after_its_request_is_aborted() -> None:
    engine = FakeEngine(lambda s, t: [accepted(s, t), PAUSE, finished(s, 1, 0)])
    stream = cast(
        AsyncGenerator[pb.GenerateStreamResponse, None],
        _servicer(engine).GenerateStream(_request(), _context()),
    )
    await anext(stream)
    await stream.aclose()
    assert engine.aborts == ["r"]


@pytest.mark.parametrize("phase", ["submitting", "paused"])
async def test_a_second_cancellation_does_not_cut_the_abort_short(phase: str) -> None:
    engine = FakeEngine(lambda s, t: [accepted(s, t), PAUSE, finished(s, 1, 0)])
    engine.hold_submits = phase == "submitting"
    engine.abort_hops = 50
    request = pb.GenerateRequest(request_id="r", prompt=pb.Prompt(text="x"))
    call = asyncio.ensure_future(_servicer(engine).Generate(request, _context()))
    await engine.reached(f"{phase} r")
    call.cancel()
    await engine.reached("aborting r")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await engine.reached("aborted r")
    assert engine.live == {}


def _intercepted(metrics: Metrics, behaviour: Any) -> Any:
    """The coroutine that gRPC would call, around a streaming behaviour."""

    async def continuation(_: object) -> Any:
        return grpc.unary_stream_rpc_method_handler(behaviour)

    class Details:
        method = "/package.Service/Method"
        invocation_metadata = ()

    async def call(context: Any) -> None:
        logger, _ = capturing_logger()
        interceptor = CallInterceptor(
            logger, ManualClock(), metrics, Gatekeeper(None), write_timeout_seconds=60.0
        )
        handler: Any = await interceptor.intercept_service(continuation, cast(Any, Details()))
        await handler.unary_stream(None, context)

    return call


async def test_grpc_43360_a_write_that_is_cancelled_closes_the_handler_then_and_there() -> None:
    """Also while a reference (here `kept`, elsewhere a traceback) still holds the generator."""
    closed: list[bool] = []
    kept: list[object] = []

    async def stream() -> AsyncGenerator[str, None]:
        try:
            yield "one"
            yield "two"
        finally:
            closed.append(True)

    def behaviour(request: object, context: object) -> AsyncGenerator[str, None]:
        kept.append(stream())
        return cast(AsyncGenerator[str, None], kept[-1])

    call = _intercepted(Metrics(), behaviour)
    with pytest.raises(asyncio.CancelledError):
        await call(_context(write_error=asyncio.CancelledError()))
    assert closed == [True]


@pytest.mark.parametrize(
    ("remaining", "code"), [(None, "CANCELLED"), (5.0, "CANCELLED"), (0.0, "DEADLINE_EXCEEDED")]
)
async def test_a_cancellation_past_the_deadline_is_counted_as_one(remaining: float | None, code: str) -> None:
    async def behaviour(request: object, context: object) -> AsyncGenerator[str, None]:
        yield "one"

    metrics = Metrics()
    call = _intercepted(metrics, behaviour)
    with pytest.raises(asyncio.CancelledError):
        await call(_context(remaining, asyncio.CancelledError()))
    assert [counted for _, counted in metrics.snapshot().grpc_server_handled_total] == [code]


@pytest.mark.fault("V")
async def test_a_write_to_a_connection_that_is_gone_is_a_cancellation_and_no_fault_of_ours() -> None:
    """gRPC fails the write before it cancels the call: that was logged with a traceback, and INTERNAL."""

    async def behaviour(request: object, context: object) -> AsyncGenerator[str, None]:
        yield "one"

    metrics = Metrics()
    with pytest.raises(asyncio.CancelledError):
        await _intercepted(metrics, behaviour)(_context(write_error=grpc.aio.InternalError("gone")))
    assert [counted for _, counted in metrics.snapshot().grpc_server_handled_total] == ["CANCELLED"]
