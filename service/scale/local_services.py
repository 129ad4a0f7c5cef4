"""The services of one engine without a server: a method's name and a request's bytes in, bytes out.

The servicers are those of `rpc`, so that a replica answers, refuses and names errors as one server does.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

import grpc
import structlog
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from pageturner.service.engine.api import DrainOutcome, EngineClient
from pageturner.service.errors import InvalidArgument, PageturnerError
from pageturner.service.rpc.admin import AdminServicer
from pageturner.service.rpc.callers import bind_caller
from pageturner.service.rpc.generation import GenerationServicer
from pageturner.service.rpc.lifecycle import Lifecycle
from pageturner.service.rpc.models import ModelServicer
from pageturner.service.rpc.options import ServerOptions
from pageturner.service.rpc.tracing import bind_trace_parent
from pageturner.service.scale.calls import Call, Failure
from pageturner.v1 import admin_pb2, generation_pb2, model_pb2

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class _CallContext:
    """As much of a gRPC context as the servicers look at."""

    call: Call

    def time_remaining(self) -> float | None:
        return self.call.deadline_seconds

    def peer(self) -> str:
        return self.call.peer


@dataclass(frozen=True, slots=True)
class _Method:
    request: type[Message]
    behaviour: Callable[[Any, _Context], Any]


class LocalServices:
    """Of one started engine. Every request is expected to have its id already.

    pause: awaited behind each message with tokens of a stream; those that come meanwhile are the next one.
    """

    def __init__(
        self,
        engine: EngineClient,
        options: ServerOptions,
        logger: structlog.typing.FilteringBoundLogger,
        new_request_id: Callable[[], str],
        pause: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self._pause = pause
        lifecycle = Lifecycle()
        lifecycle.attach(engine)
        self._logger = logger
        self._methods: Mapping[str, _Method] = dict(
            (
                *_methods(generation_pb2, GenerationServicer(options, lifecycle, logger, new_request_id)),
                *_methods(model_pb2, ModelServicer(lifecycle)),
                *_methods(admin_pb2, AdminServicer(options, lifecycle, _never_drained)),
            )
        )

    async def ask(self, method: str, request: bytes, call: Call) -> bytes | Failure:
        """The answer of a unary method, or what the client is to be told."""
        try:
            message, context = self._begin(method, request, call)
            answer: Awaitable[Message] = self._methods[method].behaviour(message, context)
            return (await answer).SerializeToString()
        except Exception as error:
            return self._failed(method, error)

    async def follow(self, method: str, request: bytes, call: Call) -> AsyncGenerator[bytes | Failure, None]:
        """The messages of a stream; where it fails, a Failure last. Closing it ends the request."""
        try:
            message, context = self._begin(method, request, call)
            messages: AsyncIterator[Message] = self._methods[method].behaviour(message, context)
            async with aclosing(cast(AsyncGenerator[Message, None], messages)) as open_messages:
                async for each in open_messages:
                    has_tokens = isinstance(each, generation_pb2.GenerateStreamResponse) and each.HasField(
                        "delta"
                    )
                    yield each.SerializeToString()
                    if has_tokens and self._pause is not None:
                        await self._pause()
        except Exception as error:
            yield self._failed(method, error)

    def _begin(self, method: str, request: bytes, call: Call) -> tuple[Message, _Context]:
        bind_caller(call.caller)
        bind_trace_parent(call.trace_parent)
        try:
            message = self._methods[method].request.FromString(request)
        except DecodeError as error:
            raise InvalidArgument("request", "the bytes are no message of this method") from error
        return message, cast(_Context, _CallContext(call))

    def _failed(self, method: str, error: Exception) -> Failure:
        if not isinstance(error, PageturnerError):
            self._logger.error("rpc_error", method=method, exc_info=error)
        return Failure.of(error)


def _methods(module: Any, servicer: object) -> Iterator[tuple[str, _Method]]:
    services: Mapping[str, ServiceDescriptor] = module.DESCRIPTOR.services_by_name
    for service in services.values():
        for method in service.methods:
            yield method.name, _Method(GetMessageClass(method.input_type), getattr(servicer, method.name))


async def _never_drained(_grace_seconds: float | None) -> DrainOutcome:
    """Ray ends replicas, by their options: one that a client drained would still be sent requests."""
    raise InvalidArgument("method", "replicas are drained by Ray: change their number, or deploy anew")
