"""The Python client of a Pageturner server.

    async with Client("localhost:50051") as client:
        async for event in client.stream("Once upon a time", max_tokens=64):
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)

Nothing but grpc stands behind it. Every failure of a call is a `PageturnerError`: the class that the
server raised, or `UnknownStatus` with the gRPC code for what the server did not say itself.
Leaving a stream early, or cancelling the task that awaits a call, aborts the request on the server.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType, TracebackType
from typing import Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pageturner.policies.spec import PolicySpec
from pageturner.policies.views import Rates
from pageturner.service.client.values import (
    Accepted,
    Choice,
    ChoiceFinished,
    Completion,
    Delta,
    Finished,
    Options,
    Sampling,
    StreamItem,
)
from pageturner.service.client.wire import (
    ABORT_OUTCOMES,
    field_values,
    from_matched,
    from_message,
    from_model,
    from_policy,
    from_reason,
    from_stats,
    from_timings,
    from_tokens,
    from_usage,
    to_choice,
    to_prompt,
    to_request,
)
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.engine.api import (
    AbortOutcome,
    ChatMessage,
    ChatPrompt,
    ModelInfo,
    PoliciesInfo,
    Prompt,
    ServerInfo,
    TextPrompt,
)
from pageturner.service.errors import DeadlineExceeded
from pageturner.service.rpc.status import UnknownStatus, from_status
from pageturner.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)

__all__ = [
    "CHANNEL_OPTIONS",
    "Accepted",
    "ChatMessage",
    "ChatPrompt",
    "Choice",
    "ChoiceFinished",
    "Client",
    "Completion",
    "Delta",
    "Finished",
    "Options",
    "Sampling",
    "StreamItem",
    "TextPrompt",
]

DEFAULT_TARGET = "localhost:50051"
"""Where a server of this machine listens unless it is told otherwise."""

MAX_MESSAGE_BYTES = 64 << 20

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
"""A server that is gone is noticed within 40 s of silence; servers of ours allow a ping every 10 s."""

_STATUS_KEY = "grpc-status-details-bin"
_T = TypeVar("_T")


class Client:
    """One server. Needs a running event loop; close it, or use it as an async context manager.

    target: host:port, or any other name that gRPC resolves.
    """

    def __init__(self, target: str, *, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._target = target
        self._channel = (
            grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(target, credentials, options=CHANNEL_OPTIONS)
        )
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._model = model_pb2_grpc.ModelServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer at once."""
        request, timeout = to_request(generation_pb2.GenerateRequest, prompt, options)
        response = await _typed(self._generation.Generate(request, timeout=timeout))
        return Completion(
            response.request_id,
            response.seed,
            tuple(
                Choice(
                    choice.index, choice.text, from_tokens(choice), from_reason(choice), from_matched(choice)
                )
                for choice in response.choices
            ),
            from_usage(response.usage),
            from_timings(response.timings),
            dict(response.policies),
            response.policies_changed,
        )

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncGenerator[StreamItem, None]:
        """The answer as it comes: Accepted; Deltas and a ChoiceFinished for each choice; Finished.

        Leaving the loop early should be followed by `aclose` (`contextlib.aclosing` does so).
        """
        request, timeout = to_request(generation_pb2.GenerateStreamRequest, prompt, options)
        call = self._generation.GenerateStream(request, timeout=timeout)
        try:
            with _typed_errors():
                async for message in call:
                    if (item := from_message(message)) is not None:
                        yield item
        finally:
            call.cancel()

    def chat(
        self,
        messages: Iterable[ChatMessage],
        *,
        template_variables: Mapping[str, object] | None = None,
        continue_final_message: bool = False,
        **options: Unpack[Options],
    ) -> AsyncGenerator[StreamItem, None]:
        """`stream` with a conversation for a prompt, through the model's chat template.

        template_variables: for the template, such as `enable_thinking`; values as JSON has them.
        continue_final_message: the answer goes on with the last message in place of a turn of its own.
        """
        turns = tuple(messages)
        if not template_variables and not continue_final_message:
            return self.stream(turns, **options)
        return self.stream(ChatPrompt(turns, template_variables or {}, continue_final_message), **options)

    async def abort(self, *request_ids: str) -> Mapping[str, AbortOutcome]:
        """End requests by id; what became of each."""
        request = generation_pb2.AbortRequest(request_ids=request_ids)
        response = await _typed(self._generation.Abort(request))
        return {result.request_id: ABORT_OUTCOMES[result.outcome] for result in response.results}

    async def tokenize(
        self, prompt: Prompt, *, model: str = "", add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        request = generation_pb2.TokenizeRequest(
            model=model, prompt=to_prompt(prompt), add_special_tokens=add_special_tokens
        )
        return tuple((await _typed(self._generation.Tokenize(request))).token_ids)

    async def detokenize(self, token_ids: Iterable[int], *, model: str = "") -> str:
        request = generation_pb2.DetokenizeRequest(model=model, token_ids=token_ids)
        return (await _typed(self._generation.Detokenize(request))).text

    async def models(self) -> tuple[ModelInfo, ...]:
        """Every model served, the default one first."""
        response = await _typed(self._model.ListModels(model_pb2.ListModelsRequest()))
        return tuple(map(from_model, response.models))

    async def model(self, name: str = "") -> ModelInfo:
        """One model; raises ModelNotFound."""
        response = await _typed(self._model.GetModel(model_pb2.GetModelRequest(name=name)))
        return from_model(response.model)

    async def server_info(self) -> ServerInfo:
        info = await _typed(self._admin.GetServerInfo(admin_pb2.GetServerInfoRequest()))
        values = field_values(ServerInfo, info) | {
            "rates": Rates(**field_values(Rates, info.rates)),
            "config": dict(info.config),
        }
        return ServerInfo(**values)

    async def policies(self) -> PoliciesInfo:
        """Who decides on each axis, and how their shadows compare."""
        response = await _typed(self._admin.GetPolicies(admin_pb2.GetPoliciesRequest()))
        return PoliciesInfo(response.revision, tuple(map(from_policy, response.policies)))

    async def set_policies(
        self,
        policies: Mapping[str, PolicySpec] = MappingProxyType({}),
        *,
        shadows: Mapping[str, PolicySpec | None] = MappingProxyType({}),
        preset: str = "",
        expected_revision: int | None = None,
    ) -> PoliciesInfo:
        """Put other policies in force while requests run; axes left out stay as they are.

        shadows: policies to ask and not obey; None ends one. preset: a named set, under `policies`.
        expected_revision: refuse unless it is in force. Raises InvalidArgument, or StaleRevision; nothing
        is changed then.
        """
        request = admin_pb2.SetPoliciesRequest(
            policies={axis: to_choice(spec) for axis, spec in policies.items()},
            shadows={axis: to_choice(spec) for axis, spec in shadows.items()},
            preset=preset,
            expected_revision=expected_revision,
        )
        response = await _typed(self._admin.SetPolicies(request))
        return PoliciesInfo(response.revision, tuple(map(from_policy, response.policies)))

    async def load(self) -> SchedulerStats:
        response = await _typed(self._admin.GetLoad(admin_pb2.GetLoadRequest()))
        return from_stats(response.load)

    async def watch_load(self, interval_seconds: float) -> AsyncGenerator[SchedulerStats, None]:
        """The load now and then every so often, without end."""
        call = self._admin.WatchLoad(admin_pb2.WatchLoadRequest(interval_seconds=interval_seconds))
        try:
            with _typed_errors():
                async for message in call:
                    yield from_stats(message.load)
        finally:
            call.cancel()

    async def flight_record(self) -> bytes:
        """What the scheduler was told and decided of late, without text: a file for `pageturner replay`
        and `pageturner explain`."""
        call = self._admin.GetFlightRecord(admin_pb2.GetFlightRecordRequest())
        try:
            with _typed_errors():
                return b"".join([message.chunk async for message in call])
        finally:
            call.cancel()

    async def wait_until_serving(self, timeout_seconds: float) -> None:
        """Return once the server can be reached and says it is ready; raises DeadlineExceeded."""
        stub = health_pb2_grpc.HealthStub(self._channel)  # type: ignore[no-untyped-call] # has no types
        request = health_pb2.HealthCheckRequest(service="pageturner.v1.GenerationService")
        call = stub.Watch(request, timeout=timeout_seconds, wait_for_ready=True)
        try:
            with _typed_errors():
                async for answer in call:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
        except DeadlineExceeded as error:
            reason = f"no server at {self._target} was ready within {timeout_seconds:g} s"
            raise DeadlineExceeded(reason) from error
        finally:
            call.cancel()
        raise UnknownStatus("UNAVAILABLE", "the server ended the health watch")


# Errors


@contextmanager
def _typed_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        # The pairs, as dict() of aio's Metadata fails in grpcio 1.72.
        packed = [value for key, value in error.trailing_metadata() or () if key == _STATUS_KEY]
        status = packed[0] if packed and isinstance(packed[0], bytes) else b""
        raise from_status(error.code(), error.details() or "", status) from error


async def _typed(call: Awaitable[_T]) -> _T:
    with _typed_errors():
        return await call
