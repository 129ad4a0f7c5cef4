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

import json
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pageturner.policies.views import Rates
from pageturner.service.core.outputs import (
    FinishReason,
    RequestTimings,
    SampledToken,
    SchedulerStats,
    TokenLogprob,
    Usage,
)
from pageturner.service.core.shadow import Disagreement
from pageturner.service.engine.api import (
    AbortOutcome,
    ChatMessage,
    ModelInfo,
    PoliciesInfo,
    PolicyInfo,
    PolicySpec,
    Prompt,
    ServerInfo,
    ShadowInfo,
)
from pageturner.service.rpc.status import UnknownStatus, from_status
from pageturner.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)

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


class Sampling(TypedDict, total=False):
    """How tokens are chosen: the fields of the wire's SamplingParams, where each is explained."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    n: int
    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop: bool
    logprobs: int


class Options(Sampling, total=False):
    """What else a request may state. timeout_seconds: the time limit, which reaches the scheduler."""

    request_id: str
    model: str
    priority: int
    tenant: str
    cache_salt: str
    bypass_prefix_cache: bool
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request was queued under this id; the seed and the bound on tokens in force."""

    request_id: str
    seed: int
    num_prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What a choice grew by."""

    index: int
    text: str
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """A choice ended. matched: the stop string or token that ended it."""

    index: int
    reason: FinishReason
    matched: str | int | None


@dataclass(frozen=True, slots=True)
class Finished:
    """All choices ended. policies: axis to name, in force at the end; policies_changed: some came later
    than the request."""

    usage: Usage
    timings: RequestTimings
    policies: Mapping[str, str]
    policies_changed: bool = False


StreamItem = Accepted | Delta | ChoiceFinished | Finished


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole sample."""

    index: int
    text: str
    tokens: tuple[SampledToken, ...]
    reason: FinishReason
    matched: str | int | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    seed: int
    choices: tuple[Choice, ...]
    usage: Usage
    timings: RequestTimings
    policies: Mapping[str, str]
    policies_changed: bool = False

    @property
    def text(self) -> str:
        """The first choice's."""
        return self.choices[0].text


class Client:
    """One server. Needs a running event loop; close it, or use it as an async context manager.

    target: host:port, or any other name that gRPC resolves.
    """

    def __init__(self, target: str, *, credentials: grpc.ChannelCredentials | None = None) -> None:
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
        request, timeout = _request(generation_pb2.GenerateRequest, prompt, options)
        response = await _typed(self._generation.Generate(request, timeout=timeout))
        return Completion(
            response.request_id,
            response.seed,
            tuple(
                Choice(choice.index, choice.text, _tokens(choice), _reason(choice), _matched(choice))
                for choice in response.choices
            ),
            _usage(response.usage),
            _timings(response.timings),
            dict(response.policies),
            response.policies_changed,
        )

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncGenerator[StreamItem, None]:
        """The answer as it comes: Accepted; Deltas and a ChoiceFinished for each choice; Finished.

        Leaving the loop early should be followed by `aclose` (`contextlib.aclosing` does so).
        """
        request, timeout = _request(generation_pb2.GenerateStreamRequest, prompt, options)
        call = self._generation.GenerateStream(request, timeout=timeout)
        try:
            with _typed_errors():
                async for message in call:
                    if (item := _item(message)) is not None:
                        yield item
        finally:
            call.cancel()

    def chat(
        self, messages: Iterable[ChatMessage], **options: Unpack[Options]
    ) -> AsyncGenerator[StreamItem, None]:
        """`stream` with a conversation for a prompt, through the model's chat template."""
        return self.stream(tuple(messages), **options)

    async def abort(self, *request_ids: str) -> Mapping[str, AbortOutcome]:
        """End requests by id; what became of each."""
        request = generation_pb2.AbortRequest(request_ids=request_ids)
        response = await _typed(self._generation.Abort(request))
        return {result.request_id: _ABORT_OUTCOMES[result.outcome] for result in response.results}

    async def tokenize(
        self, prompt: Prompt, *, model: str = "", add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        request = generation_pb2.TokenizeRequest(
            model=model, prompt=_prompt(prompt), add_special_tokens=add_special_tokens
        )
        return tuple((await _typed(self._generation.Tokenize(request))).token_ids)

    async def detokenize(self, token_ids: Iterable[int], *, model: str = "") -> str:
        request = generation_pb2.DetokenizeRequest(model=model, token_ids=token_ids)
        return (await _typed(self._generation.Detokenize(request))).text

    async def models(self) -> tuple[ModelInfo, ...]:
        """Every model served, the default one first."""
        response = await _typed(self._model.ListModels(model_pb2.ListModelsRequest()))
        return tuple(map(_model, response.models))

    async def model(self, name: str = "") -> ModelInfo:
        """One model; raises ModelNotFound."""
        response = await _typed(self._model.GetModel(model_pb2.GetModelRequest(name=name)))
        return _model(response.model)

    async def server_info(self) -> ServerInfo:
        info = await _typed(self._admin.GetServerInfo(admin_pb2.GetServerInfoRequest()))
        values = _values(ServerInfo, info) | {
            "rates": Rates(**_values(Rates, info.rates)),
            "config": dict(info.config),
        }
        return ServerInfo(**values)

    async def policies(self) -> PoliciesInfo:
        """Who decides on each axis, and how their shadows compare."""
        response = await _typed(self._admin.GetPolicies(admin_pb2.GetPoliciesRequest()))
        return PoliciesInfo(response.revision, tuple(map(_policy, response.policies)))

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
            policies={axis: _choice(spec) for axis, spec in policies.items()},
            shadows={axis: _choice(spec) for axis, spec in shadows.items()},
            preset=preset,
            expected_revision=expected_revision,
        )
        response = await _typed(self._admin.SetPolicies(request))
        return PoliciesInfo(response.revision, tuple(map(_policy, response.policies)))

    async def load(self) -> SchedulerStats:
        response = await _typed(self._admin.GetLoad(admin_pb2.GetLoadRequest()))
        return _stats(response.load)

    async def watch_load(self, interval_seconds: float) -> AsyncGenerator[SchedulerStats, None]:
        """The load now and then every so often, without end."""
        call = self._admin.WatchLoad(admin_pb2.WatchLoadRequest(interval_seconds=interval_seconds))
        try:
            with _typed_errors():
                async for message in call:
                    yield _stats(message.load)
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


# To the wire


_Request = TypeVar("_Request", generation_pb2.GenerateRequest, generation_pb2.GenerateStreamRequest)


def _request(kind: type[_Request], prompt: Prompt, options: Options) -> tuple[_Request, float | None]:
    """What is not named among Sampling's fields has the same name in the request."""
    given = dict(options)
    timeout: Any = given.pop("timeout_seconds", None)
    sampling = {name: given.pop(name) for name in Sampling.__annotations__ if name in given}
    values: dict[str, Any] = {**given, "sampling": generation_pb2.SamplingParams(**sampling)}  # type: ignore[arg-type] # TypedDict.pop gives object
    return kind(prompt=_prompt(prompt), **values), timeout


def _prompt(prompt: Prompt) -> generation_pb2.Prompt:
    if isinstance(prompt, str):
        return generation_pb2.Prompt(text=prompt)
    ids = [part for part in prompt if isinstance(part, int)]
    if len(ids) == len(prompt):
        return generation_pb2.Prompt(token_ids=generation_pb2.TokenIds(ids=ids))
    turns = [part for part in prompt if isinstance(part, ChatMessage)]
    messages = [generation_pb2.ChatMessage(role=turn.role, content=turn.content) for turn in turns]
    return generation_pb2.Prompt(chat=generation_pb2.Chat(messages=messages))


# From the wire


_FINISH_REASONS = {
    generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    generation_pb2.FINISH_REASON_ABORTED: FinishReason.ABORTED,
}

_ABORT_OUTCOMES = {
    generation_pb2.ABORT_OUTCOME_ABORTED: AbortOutcome.ABORTED,
    generation_pb2.ABORT_OUTCOME_ALREADY_FINISHED: AbortOutcome.ALREADY_FINISHED,
    generation_pb2.ABORT_OUTCOME_NOT_FOUND: AbortOutcome.NOT_FOUND,
}


def _item(message: generation_pb2.GenerateStreamResponse) -> StreamItem | None:
    """None for an event that a newer server knows and this client does not."""
    match message.WhichOneof("event"):
        case "accepted":
            accepted = message.accepted
            return Accepted(message.request_id, accepted.seed, accepted.prompt_tokens, accepted.max_tokens)
        case "delta":
            return Delta(message.delta.index, message.delta.text, _tokens(message.delta))
        case "choice_finished":
            choice = message.choice_finished
            return ChoiceFinished(choice.index, _reason(choice), _matched(choice))
        case "finished":
            finished = message.finished
            return Finished(
                _usage(finished.usage),
                _timings(finished.timings),
                dict(finished.policies),
                finished.policies_changed,
            )
    return None


def _tokens(message: generation_pb2.Delta | generation_pb2.Choice) -> tuple[SampledToken, ...]:
    if not message.logprobs:
        return tuple(map(SampledToken, message.token_ids))
    return tuple(
        SampledToken(
            token_id,
            logprobs.chosen.logprob,
            tuple(TokenLogprob(top.token_id, top.logprob) for top in logprobs.top),
        )
        for token_id, logprobs in zip(message.token_ids, message.logprobs, strict=True)
    )


def _reason(message: generation_pb2.ChoiceFinished | generation_pb2.Choice) -> FinishReason:
    return _FINISH_REASONS.get(message.finish_reason, FinishReason.UNSPECIFIED)


def _matched(message: generation_pb2.ChoiceFinished | generation_pb2.Choice) -> str | int | None:
    match message.WhichOneof("matched"):
        case "stop_string":
            return message.stop_string
        case "stop_token_id":
            return message.stop_token_id
    return None


def _usage(usage: generation_pb2.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.cached_prompt_tokens, usage.output_tokens)


def _timings(timings: generation_pb2.Timings) -> RequestTimings:
    return RequestTimings(
        timings.queue_seconds,
        timings.prefill_seconds,
        timings.decode_seconds,
        timings.preemptions.swaps,
        timings.preemptions.recomputes,
        timings.preemptions.tail_reclaims,
    )


def _values(kind: type[Any], message: Message) -> dict[str, Any]:
    """The fields that a domain value and its message have under one name."""
    return {field.name: getattr(message, field.name) for field in fields(kind)}


def _model(model: model_pb2.Model) -> ModelInfo:
    return ModelInfo(**_values(ModelInfo, model) | {"eos_token_ids": tuple(model.eos_token_ids)})


def _choice(spec: PolicySpec | None) -> admin_pb2.PolicyChoice:
    if spec is None:
        return admin_pb2.PolicyChoice()
    options = {name: json.dumps(value) for name, value in spec.options.items()}
    return admin_pb2.PolicyChoice(name=spec.name, options=options)


def _policy(policy: admin_pb2.Policy) -> PolicyInfo:
    return PolicyInfo(
        policy.axis,
        policy.name,
        _options(policy.options),
        tuple(policy.available),
        policy.quarantined,
        policy.faults,
        policy.last_fault,
        _shadow(policy.axis, policy.shadow) if policy.HasField("shadow") else None,
    )


def _shadow(axis: str, shadow: admin_pb2.Shadow) -> ShadowInfo:
    return ShadowInfo(
        shadow.name,
        _options(shadow.options),
        shadow.compared,
        shadow.disagreements,
        tuple(Disagreement(axis, one.subject, one.obeyed, one.shadow) for one in shadow.samples),
        shadow.faults,
        shadow.last_fault,
    )


def _options(options: Mapping[str, str]) -> dict[str, object]:
    return {name: json.loads(value) for name, value in options.items()}


def _stats(load: admin_pb2.Load) -> SchedulerStats:
    return SchedulerStats(**_values(SchedulerStats, load))
