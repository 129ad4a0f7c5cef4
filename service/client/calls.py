"""Calls that a client can make: where they go, what they send, how their answers read. Those of AdminService
are in `admin_calls`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from pageturner.service.client.admin_wire import from_model
from pageturner.service.client.balancing import Wanted
from pageturner.service.client.from_wire import ABORT_OUTCOMES, from_message, from_response, from_scores
from pageturner.service.client.messages import build
from pageturner.service.client.prompts import to_chat, to_prompt
from pageturner.service.client.to_wire import to_request, to_score_request, to_timeout
from pageturner.service.client.values import Completion, Options, PromptLike, ScoreOptions, Turn
from pageturner.service.engine.api import AbortOutcome, ModelInfo, ScoreAnswer, StreamEvent
from pageturner.v1 import generation_pb2, model_pb2

_R = TypeVar("_R", bound=Message)
_T = TypeVar("_T", covariant=True)

GENERATION_SERVICE = "pageturner.v1.GenerationService"


@dataclass(frozen=True, slots=True)
class Call(Generic[_R, _T]):
    """One RPC with one answer, to be sent over a channel of either kind.

    read: the answer as a value. repeats: it may be sent once more, to any server, where one did not answer.
    session: the conversation that it belongs to.
    """

    path: str
    request: Message
    response: type[_R]
    read: Callable[[_R], _T]
    timeout_seconds: float | None = None
    repeats: bool = False
    session: str = ""

    @property
    def wanted(self) -> Wanted | None:
        """What its place among servers hangs on; None for one that goes to the current server."""
        return Wanted(num_tokens_about(self.request), self.session) if self.repeats else None


@dataclass(frozen=True, slots=True)
class StreamCall(Generic[_R, _T]):
    """One RPC with a stream of answers.

    read: one of them as a value; None for one to be passed over. waits: for a server that cannot be reached
    yet, in place of failing.
    """

    path: str
    request: Message
    response: type[_R]
    read: Callable[[_R], _T | None]
    timeout_seconds: float | None = None
    waits: bool = False


@dataclass(frozen=True, slots=True)
class AnswerCall(StreamCall[generation_pb2.GenerateStreamResponse, StreamEvent]):
    """GenerateStream, of which a part may be asked for."""

    request: generation_pb2.GenerateStreamRequest
    session: str = ""

    @property
    def wanted(self) -> Wanted:
        """What its place among servers hangs on."""
        return Wanted(num_tokens_about(self.request), self.session)


CHARACTERS_A_TOKEN = 4
"""Of English, as a rule of thumb: a balancer needs no more."""


def num_tokens_about(request: Message) -> int:
    """Of the prompt of a request, roughly; 0 for a request that has none."""
    prompt = getattr(request, "prompt", None)
    if not isinstance(prompt, generation_pb2.Prompt):
        return 0
    if prompt.HasField("token_ids"):
        return len(prompt.token_ids.ids)
    return prompt.ByteSize() // CHARACTERS_A_TOKEN


def generate(prompt: PromptLike, options: Options) -> Call[generation_pb2.GenerateResponse, Completion]:
    request, timeout = to_request(generation_pb2.GenerateRequest, to_prompt(prompt), options)
    path = path_of(generation_pb2.DESCRIPTOR, "GenerationService", "Generate")
    session = options.get("session", "")
    return Call(
        path, request, generation_pb2.GenerateResponse, from_response, timeout, repeats=True, session=session
    )


def stream(prompt: PromptLike, options: Options) -> AnswerCall:
    return _stream(to_prompt(prompt), options)


def chat(
    messages: Iterable[Turn],
    template_variables: Mapping[str, object] | None,
    continue_final_message: bool,
    tools: Iterable[object],
    template: str,
    options: Options,
) -> AnswerCall:
    chat = to_chat(messages, template_variables or {}, continue_final_message, tools, template)
    return _stream(chat, options)


def _stream(prompt: generation_pb2.Prompt, options: Options) -> AnswerCall:
    request, timeout = to_request(generation_pb2.GenerateStreamRequest, prompt, options)
    path = path_of(generation_pb2.DESCRIPTOR, "GenerationService", "GenerateStream")
    return AnswerCall(
        path,
        request,
        generation_pb2.GenerateStreamResponse,
        from_message,
        timeout,
        session=options.get("session", ""),
    )


def score(
    prompt: PromptLike, continuations: Iterable[str | Iterable[int]], options: ScoreOptions
) -> Call[generation_pb2.ScoreResponse, ScoreAnswer]:
    request, timeout = to_score_request(to_prompt(prompt), continuations, options)
    path = path_of(generation_pb2.DESCRIPTOR, "GenerationService", "Score")
    session = options.get("session", "")
    return Call(
        path, request, generation_pb2.ScoreResponse, from_scores, timeout, repeats=True, session=session
    )


def abort(request_ids: Iterable[str]) -> Call[generation_pb2.AbortResponse, Mapping[str, AbortOutcome]]:
    return Call(
        path_of(generation_pb2.DESCRIPTOR, "GenerationService", "Abort"),
        build(generation_pb2.AbortRequest, request_ids=request_ids),
        generation_pb2.AbortResponse,
        lambda response: {one.request_id: ABORT_OUTCOMES[one.outcome] for one in response.results},
    )


def tokenize(
    prompt: PromptLike, model: str, add_special_tokens: bool
) -> Call[generation_pb2.TokenizeResponse, tuple[int, ...]]:
    return Call(
        path_of(generation_pb2.DESCRIPTOR, "GenerationService", "Tokenize"),
        build(
            generation_pb2.TokenizeRequest,
            model=model,
            prompt=to_prompt(prompt),
            add_special_tokens=add_special_tokens,
        ),
        generation_pb2.TokenizeResponse,
        lambda response: tuple(response.token_ids),
        repeats=True,
    )


def render(prompt: PromptLike, model: str) -> Call[generation_pb2.TokenizeResponse, str]:
    return Call(
        path_of(generation_pb2.DESCRIPTOR, "GenerationService", "Tokenize"),
        build(generation_pb2.TokenizeRequest, model=model, prompt=to_prompt(prompt), return_prompt=True),
        generation_pb2.TokenizeResponse,
        lambda response: response.rendered_prompt,
        repeats=True,
    )


def detokenize(token_ids: Iterable[int], model: str) -> Call[generation_pb2.DetokenizeResponse, str]:
    return Call(
        path_of(generation_pb2.DESCRIPTOR, "GenerationService", "Detokenize"),
        build(generation_pb2.DetokenizeRequest, model=model, token_ids=token_ids),
        generation_pb2.DetokenizeResponse,
        lambda response: response.text,
        repeats=True,
    )


def models() -> Call[model_pb2.ListModelsResponse, tuple[ModelInfo, ...]]:
    return Call(
        path_of(model_pb2.DESCRIPTOR, "ModelService", "ListModels"),
        model_pb2.ListModelsRequest(),
        model_pb2.ListModelsResponse,
        lambda response: tuple(map(from_model, response.models)),
        repeats=True,
    )


def model(name: str) -> Call[model_pb2.GetModelResponse, ModelInfo]:
    return Call(
        path_of(model_pb2.DESCRIPTOR, "ModelService", "GetModel"),
        build(model_pb2.GetModelRequest, name=name),
        model_pb2.GetModelResponse,
        lambda response: from_model(response.model),
        repeats=True,
    )


def check_health(service: str, timeout_seconds: float | None) -> Call[health_pb2.HealthCheckResponse, bool]:
    """Whether the server is ready for requests to this service."""
    return Call(
        path_of(health_pb2.DESCRIPTOR, "Health", "Check"),
        build(health_pb2.HealthCheckRequest, service=service),
        health_pb2.HealthCheckResponse,
        lambda response: response.status == health_pb2.HealthCheckResponse.SERVING,
        to_timeout(timeout_seconds),
    )


def watch_health(timeout_seconds: float | None) -> StreamCall[health_pb2.HealthCheckResponse, bool]:
    """A stream that says, now and at every change, whether the server is ready for requests."""
    return StreamCall(
        path_of(health_pb2.DESCRIPTOR, "Health", "Watch"),
        health_pb2.HealthCheckRequest(service=GENERATION_SERVICE),
        health_pb2.HealthCheckResponse,
        lambda response: response.status == health_pb2.HealthCheckResponse.SERVING,
        to_timeout(timeout_seconds),
        waits=True,
    )


def path_of(file: FileDescriptor, service: str, method: str) -> str:
    """As gRPC spells the method."""
    found = file.services_by_name[service].methods_by_name[method]
    return f"/{found.containing_service.full_name}/{found.name}"
