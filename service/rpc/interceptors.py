"""Around every call: who makes it, its errors as statuses, a line in the access log, a tick of counters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from pageturner.service.core.clock import Clock
from pageturner.service.engine.metrics import Method, Metrics
from pageturner.service.errors import (
    EngineDead,
    InvalidArgument,
    PageturnerError,
    PermissionDenied,
    RefusalCause,
    StepFailed,
    TextFailed,
    Unauthenticated,
)
from pageturner.service.identity import Identity
from pageturner.service.rpc.callers import ADMIN_SERVICES, OPEN_SERVICES, Gatekeeper, bind_caller
from pageturner.service.rpc.line_budget import LineBudget
from pageturner.service.rpc.load_report import OWN_TRAILER, TRAILER
from pageturner.service.rpc.open_calls import OpenCalls
from pageturner.service.rpc.status import code_of, to_status
from pageturner.service.rpc.tracing import (
    CallTrace,
    CallTracer,
    Metadata,
    bind_trace_parent,
    trace_parent_of,
)
from pageturner.service.rpc.write_watch import WriteWatch
from pageturner.service.trace_context import trace_id_of

Context = grpc.aio.ServicerContext[Any, Any]

_BORN_OF_FAULTS = (EngineDead, StepFailed, TextFailed)
"""Errors whose cause the log has to show: the client is not told it."""
_QUIET_SERVICES = frozenset({"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"})

_BALANCED_SERVICES = frozenset({"pageturner.v1.GenerationService"})

_QUIET_METHODS = frozenset(
    {
        "Tokenize",
        "Detokenize",
        "GetLoad",
        "GetServerInfo",
        "GetPolicies",
        "GetActivity",
        "GetBlocks",
        "ListRequests",
        "ListTenants",
    }
)
"""Of which clients make one for each request, as the load test does, or one a second, as `pageturner top` and
balancers do, and which change nothing: logged at debug unless they fail."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """The one place where a call begins and ends.

    Its caller is proved before the request is taken in (where certificates have a say, before it is parsed),
    and handed on by `callers.current_caller`. A stream of an admin service is proved again at each message.
    A streaming handler is an async generator to its author and a coroutine that writes to gRPC. So a
    cancellation, also one that comes while a write waits for a slow client, is raised inside of it, and
    its `finally` runs then and there, not when the garbage collector finds the generator.

    tracer: None where no spans are made; log lines name the caller's trace even so. load_report: goes into
    the trailers of calls that are balanced.
    write_timeout_seconds: a client that stopped reading would hold its handler, and its id, for ever.
    """

    def __init__(
        self,
        logger: structlog.typing.FilteringBoundLogger,
        clock: Clock,
        metrics: Metrics,
        gatekeeper: Gatekeeper,
        *,
        write_timeout_seconds: float,
        tracer: CallTracer | None = None,
        load_report: Callable[[], bytes] | None = None,
    ) -> None:
        self._tracer = tracer
        self._load_report = load_report
        self._gatekeeper = gatekeeper
        self._stranger_lines = LineBudget(clock)
        self._open_calls = OpenCalls()
        self._write_timeout_seconds = write_timeout_seconds
        self._logger = logger
        self._clock = clock
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        requests = "stream" if handler.request_streaming else "unary"
        answers = "stream" if handler.response_streaming else "unary"
        behaviour = getattr(handler, f"{requests}_{answers}")
        _, service, name = handler_call_details.method.split("/")
        method = Method(_TYPES[requests, answers], service, name)
        try:
            early = self._gatekeeper.admit_early(service, handler_call_details.invocation_metadata or ())
        except PageturnerError as error:
            return self._refuse(method, error)

        def admit(context: Context) -> Identity:
            return self._gatekeeper.admit(service, context) if early is None else early

        deserializer = handler.request_deserializer
        read: Callable[[Any, Any], Any] = _read_each if handler.request_streaming else _read
        if service in OPEN_SERVICES and not handler.request_streaming:
            # Of a stranger not even one message is taken in unbounded.
            guard = self._open_calls.stream if handler.response_streaming else self._open_calls.unary
            behaviour, requests = guard(behaviour, partial(_read, deserializer)), "stream"
            read = _unread

        async def answer(request: Any, context: Context) -> Any:
            async with self._observe(method, context, admit):
                return await behaviour(read(deserializer, request), context)

        async def stream(request: Any, context: Context) -> None:
            async with self._observe(method, context, admit):
                with WriteWatch(self._write_timeout_seconds) as watch:
                    has_begun = False
                    async with aclosing(behaviour(read(deserializer, request), context)) as responses:
                        async for response in responses:
                            if service in ADMIN_SERVICES:
                                # Without end by themselves: a token that was revoked must not see on.
                                self._gatekeeper.admit(service, context)
                            if not has_begun:
                                # Else the first write sends it. A write that is cancelled does not count as
                                # sent: the status would send it once more, fail, and never come.
                                await context.send_initial_metadata(())
                                has_begun = True
                            watch.write_begins()
                            await context.write(response)
                            watch.write_ended()

        make_handler = getattr(grpc, f"{requests}_{answers}_rpc_method_handler")
        wrapped: grpc.RpcMethodHandler[Any, Any] = make_handler(
            stream if handler.response_streaming else answer,
            request_deserializer=None,
            response_serializer=handler.response_serializer,
        )
        return wrapped

    def _refuse(self, method: Method, error: PageturnerError) -> grpc.RpcMethodHandler[Any, Any]:
        """A handler that takes in nothing of the request: a stranger's messages would be held in memory."""

        def admit(_: Context) -> Identity:
            raise error

        async def refuse(_requests: object, context: Context) -> None:
            async with self._observe(method, context, admit):
                raise AssertionError("nobody was admitted")

        return grpc.stream_unary_rpc_method_handler(refuse)

    @asynccontextmanager
    async def _observe(
        self, method: Method, context: Context, admit: Callable[[Context], Identity]
    ) -> AsyncIterator[None]:
        started_at, peer = self._clock.now(), context.peer()  # a cancelled call has no peer any more
        self._metrics.call_started(method)
        trace: CallTrace | None = None
        code = grpc.StatusCode.OK
        refusal: dict[str, object] = {}
        is_admitted = False
        try:
            caller = admit(context)
            bind_caller(caller)
            _bind_to_log(caller)
            # Not before: a stranger adds nothing to anybody's trace.
            trace = self._begin_trace(method, context.invocation_metadata() or ())
            is_admitted = True
            yield
            if trailers := self._trailers(method):
                context.set_trailing_metadata(trailers)
        except asyncio.CancelledError:
            code = _cancellation_code(context)
            raise
        except grpc.aio.InternalError as error:
            # A write failed: the connection is gone, and gRPC is yet to cancel the call.
            code = grpc.StatusCode.CANCELLED
            self._logger.debug("write_failed", method=method.grpc_method, reason=str(error), **_bound())
            raise asyncio.CancelledError from error
        except Exception as error:
            code = code_of(error)
            if isinstance(error, Unauthenticated | PermissionDenied) and error.cause is not None:
                refusal = self._refused(error, error.cause)
            if not isinstance(error, PageturnerError) or isinstance(error, _BORN_OF_FAULTS):
                self._logger.error("rpc_error", method=method.grpc_method, exc_info=error, **_bound())
            status = rpc_status.to_status(  # type: ignore[no-untyped-call] # grpcio-status has no types
                to_status(error, _bound().get("request_id", ""))
            )
            trailers = self._trailers(method) if is_admitted else ()
            try:
                await context.abort_with_status(
                    status._replace(trailing_metadata=(*status.trailing_metadata, *trailers))
                )
            except grpc.aio.InternalError:
                # Nothing can be sent behind a first message that the client's window has no room for, and
                # gRPC would log its traceback. The client learns it from the end of its connection.
                raise asyncio.CancelledError from error
        finally:
            seconds = self._clock.now() - started_at
            self._metrics.call_handled(method, code.name, seconds)
            if trace is not None:
                bound = _bound()
                trace.end(code.name, request_id=bound.get("request_id", ""), tenant=bound.get("tenant", ""))
            is_quiet = method.grpc_service in _QUIET_SERVICES or (
                method.grpc_method in _QUIET_METHODS and code is grpc.StatusCode.OK
            )
            if refusal and not is_admitted:
                left_out = self._stranger_lines.take()
                is_quiet = left_out is None
                refusal |= {"left_out": left_out} if left_out else {}
            log = self._logger.debug if is_quiet else self._logger.info
            log(
                "rpc",
                service=method.grpc_service,
                method=method.grpc_method,
                code=code.name,
                seconds=round(seconds, 6),
                peer=peer,
                **_bound(),
                **refusal,
            )

    def _trailers(self, method: Method) -> tuple[tuple[str, bytes], ...]:
        """The load, behind each answer of those services whose calls are balanced."""
        if self._load_report is None or method.grpc_service not in _BALANCED_SERVICES:
            return ()
        report = self._load_report()
        return ((TRAILER, report), (OWN_TRAILER, report))

    def _begin_trace(self, method: Method, metadata: Metadata) -> CallTrace | None:
        """Have what the call causes, and its log lines, belong to its trace, if it has one."""
        trace = None if self._tracer is None else self._tracer.begin(method, metadata)
        trace_parent = trace_parent_of(metadata) if trace is None else trace.trace_parent
        if trace_parent:
            bind_trace_parent(trace_parent)
            structlog.contextvars.bind_contextvars(trace_id=trace_id_of(trace_parent))
        return trace

    def _refused(self, error: Unauthenticated | PermissionDenied, cause: RefusalCause) -> dict[str, object]:
        """Count a caller that was turned away; what the log says of it."""
        self._metrics.caller_refused(cause)
        claimed = error.credential if isinstance(error, Unauthenticated) else ""
        return {"cause": cause.value, **({"claimed": claimed} if claimed else {})}


_TYPES = {
    ("unary", "unary"): "unary",
    ("unary", "stream"): "server_stream",
    ("stream", "unary"): "client_stream",
    ("stream", "stream"): "bidi_stream",
}


def _read(deserializer: Callable[[bytes], Any] | None, request: Any) -> Any:
    """A request off the wire. Here rather than in gRPC, where bytes that are no such message end as UNKNOWN
    with the words of a Python exception, and as a traceback in the log."""
    if deserializer is None:
        return request
    try:
        return deserializer(request)
    except DecodeError as error:
        raise InvalidArgument(
            "request", "the bytes are no message of this method, or a string is no UTF-8"
        ) from error


def _unread(_deserializer: Callable[[bytes], Any] | None, messages: Any) -> Any:
    """Messages whose behaviour reads them itself."""
    return messages


async def _read_each(
    deserializer: Callable[[bytes], Any] | None, requests: AsyncIterator[Any]
) -> AsyncIterator[Any]:
    async for request in requests:
        yield _read(deserializer, request)


def _cancellation_code(context: Context) -> grpc.StatusCode:
    remaining: float | None = context.time_remaining()  # None without a deadline
    if remaining is not None and remaining <= 0:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return grpc.StatusCode.CANCELLED


def _bind_to_log(caller: Identity) -> None:
    """Have this call's log lines name the caller; never a secret."""
    if caller.tenant:
        structlog.contextvars.bind_contextvars(tenant=caller.tenant)
    if caller.credential:
        structlog.contextvars.bind_contextvars(credential=caller.credential)


_BOUND_NAMES = ("request_id", "tenant", "credential", "trace_id")


def _bound() -> dict[str, Any]:
    """What is bound for this call's log lines: who calls, and the request id once it is known."""
    bound = structlog.contextvars.get_contextvars()
    return {name: bound[name] for name in _BOUND_NAMES if name in bound}
