"""What runs in Ray's gRPC proxies: the services' names, and a closer look at each call. Knows nothing of Ray.

Ray's own handler of a stream hears of a cancellation where it waits for the next message, and there alone.
One that comes while a message is written ends the handler and nothing behind it: the answer would be computed
to its end, for nobody. So a task of its own reads the answer here, which waits for messages alone; whatever
ends the call ends the task, where Ray hears of it. And what is left of a call's time, which Ray passes on to
nobody, is stated in its metadata.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2_grpc

from pageturner.service.client.credentials import DEADLINE_KEY
from pageturner.service.core.clock import Clock, MonotonicClock
from pageturner.service.errors import InvalidArgument, SlowConsumer
from pageturner.service.scale.calls import Failure
from pageturner.service.scale.statuses import RpcContext, end_with
from pageturner.v1 import admin_pb2_grpc, generation_pb2_grpc, model_pb2_grpc

UNREAD_SECONDS = 30.0
"""How long a message of a stream may wait for its reader while others come, as with one server."""

UNREADABLE = InvalidArgument("request", "the bytes are no message of this method, or a string is no UTF-8")
"""As one server says it."""

_ADD: tuple[Callable[[Any, Any], None], ...] = (
    generation_pb2_grpc.add_GenerationServiceServicer_to_server,
    model_pb2_grpc.add_ModelServiceServicer_to_server,
    admin_pb2_grpc.add_AdminServiceServicer_to_server,
    health_pb2_grpc.add_HealthServicer_to_server,
)

_Context = grpc.aio.ServicerContext[Any, Any]
_Metadata = tuple[tuple[str, str | bytes], ...]
_MakeHandler = Callable[..., Callable[[Any, Any], Any]]


class ProxyServer(Protocol):
    """As much of the server in Ray's proxy as is touched: it has a handler of Ray's made for each method that
    is added, whatever the servicer."""

    service_handler_factory: _MakeHandler

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None: ...

    def add_registered_method_handlers(self, service: str, methods: Mapping[str, Any]) -> None: ...


def add_services(servicer: object, server: ProxyServer) -> None:
    """Add all services, as the generated functions each add one; `grpc_options.grpc_servicer_functions` names
    this."""
    make = server.service_handler_factory
    server.service_handler_factory = partial(_handler, make, MonotonicClock())
    try:
        for add in _ADD:
            add(servicer, _Reading(server))
    finally:
        server.service_handler_factory = make


class _Reading:
    """The server, with another reader of requests: gRPC itself answers UNKNOWN where a request is none."""

    def __init__(self, server: ProxyServer) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        for handler in handlers:  # exchanged as Ray itself exchanges them
            handler._method_handlers = _with_own_reader(handler._method_handlers)
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, methods: Mapping[str, Any]) -> None:
        self._server.add_registered_method_handlers(service, _with_own_reader(methods))


def _with_own_reader(methods: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: method._replace(request_deserializer=partial(_read_request, method.request_deserializer))
        for name, method in methods.items()
    }


def _read_request(read: Callable[[bytes], Message], content: bytes) -> Message | None:
    """None for bytes that are no request."""
    try:
        return read(content)
    except DecodeError:
        return None


def _handler(
    make: _MakeHandler, clock: Clock, *, service_method: str, streaming_type: str
) -> Callable[..., Any]:
    """Ray's handler of a method, with the closer look where the method has one request."""
    handle = make(service_method=service_method, streaming_type=streaming_type)

    async def unary(request: Message | None, context: _Context) -> Any:
        if request is None:
            end_with(cast(RpcContext, context), Failure.of(UNREADABLE))
            return b""
        return await cast(Awaitable[Any], handle(request, _CallContext(context)))

    async def stream(request: Message | None, context: _Context) -> AsyncGenerator[bytes, None]:
        if request is None:
            end_with(cast(RpcContext, context), Failure.of(UNREADABLE))
            return
        own = _CallContext(context)
        answer = _Answer(own, clock)
        reading = asyncio.create_task(answer.read(handle(request, own)))
        try:
            async for message in answer.messages():
                yield message
            await asyncio.wait((reading,))
            if not reading.cancelled():
                reading.result()  # raises what it raised
        finally:
            own.end()
            reading.cancel()

    looking = {"unary_unary": unary, "unary_stream": stream}
    return looking.get(streaming_type, handle)


class _Answer:
    """Between the task that reads an answer and the call that writes it."""

    def __init__(self, context: _CallContext, clock: Clock) -> None:
        self._context = context
        self._clock = clock
        self._unread: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._written_since: float | None = None  # None while nothing is

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """To be written, each before the next is asked for."""
        while (message := await self._unread.get()) is not None:
            self._written_since = self._clock.now()
            yield message
            self._written_since = None

    async def read(self, answer: AsyncGenerator[bytes, None]) -> None:
        """All of an answer. Waits for nothing but the answer, so that a cancellation always comes to where
        Ray waits for it, which ends the answer as if it were whole."""
        is_read = True
        try:
            async for message in answer:
                if not is_read:
                    continue
                is_read = not self._is_late()
                if is_read:
                    self._unread.put_nowait(message)
                else:  # thrown where this waits next
                    cast("asyncio.Task[None]", asyncio.current_task()).cancel()
        finally:
            if not is_read:
                failure = Failure.of(SlowConsumer(f"the stream was not read for {UNREAD_SECONDS:g} s"))
                end_with(self._context, failure)
            self._unread.put_nowait(None)

    def _is_late(self) -> bool:
        since = self._written_since
        return since is not None and self._clock.now() - since >= UNREAD_SECONDS


class _CallContext:
    """A call's context for Ray's handler, in whose metadata stands how long there is.

    The handler may outlive the call by some moments, and ask then who called: gRPC, asked for what it has
    freed, ends the process. So all that it can be asked for is looked up at once, and what is told to a call
    that is over goes nowhere.
    """

    def __init__(self, context: _Context) -> None:
        """In the call's own task."""
        self._context = context
        self._is_over = False
        self._metadata = _with_time_left(context)
        self._peer = context.peer()
        self._connection = context.auth_context()
        self._identities, self._identity_key = context.peer_identities(), context.peer_identity_key()

    def end(self) -> None:
        """The call is over."""
        self._is_over = True

    def invocation_metadata(self) -> _Metadata:
        return self._metadata

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> Any:
        return self._connection

    def peer_identities(self) -> Any:
        return self._identities

    def peer_identity_key(self) -> Any:
        return self._identity_key

    def code(self) -> Any:
        return grpc.StatusCode.CANCELLED if self._is_over else self._context.code()

    def details(self) -> Any:
        return "" if self._is_over else self._context.details()

    def trailing_metadata(self) -> Any:
        return () if self._is_over else self._context.trailing_metadata()

    def set_code(self, code: Any) -> None:
        if not self._is_over:
            self._context.set_code(code)

    def set_details(self, details: str) -> None:
        if not self._is_over:
            self._context.set_details(details)

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        if not self._is_over:
            self._context.set_trailing_metadata(trailing_metadata)

    def set_compression(self, compression: grpc.Compression) -> None:
        if not self._is_over:
            self._context.set_compression(compression)


def _with_time_left(context: _Context) -> _Metadata:
    """The time as gRPC itself knows it takes the place of what the client says of it."""
    metadata = tuple((key, value) for key, value in context.invocation_metadata() or ())
    left = context.time_remaining()
    if left is None:
        return metadata
    others = (pair for pair in metadata if pair[0] != DEADLINE_KEY)
    return (*others, (DEADLINE_KEY, f"{max(0.0, left):.3f}"))
