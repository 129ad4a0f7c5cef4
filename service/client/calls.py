"""Every call that a client can make: where it goes, what it sends, how its answer reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from pageturner.policies.spec import PolicySpec
from pageturner.service.client.balancing import Wanted
from pageturner.service.client.live import (
    REQUEST_ORDERS,
    REQUEST_STATES,
    PrefixNews,
    from_activity,
    from_blocks,
    from_prefix_summary,
    from_request_page,
)
from pageturner.service.client.messages import build, check_number
from pageturner.service.client.prompts import to_chat, to_prompt
from pageturner.service.client.values import (
    BlockPoolMap,
    Completion,
    Options,
    PromptLike,
    RequestOrder,
    RequestPage,
    ScoreOptions,
    Turn,
)
from pageturner.service.client.wire import (
    ABORT_OUTCOMES,
    from_adapter,
    from_message,
    from_model,
    from_policies,
    from_response,
    from_scores,
    from_server_info,
    from_stats,
    from_tenants,
    to_choices,
    to_request,
    to_score_request,
    to_timeout,
)
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.core.prefix_summary import PrefixSummary
from pageturner.service.engine.api import (
    AbortOutcome,
    Activity,
    AdapterInfo,
    DrainOutcome,
    ModelInfo,
    RequestState,
    ScoreAnswer,
    ServerInfo,
    StreamEvent,
)
from pageturner.service.engine.tenants import TenantsReport
from pageturner.service.errors import InvalidArgument
from pageturner.service.policy_host.reports import PoliciesInfo
from pageturner.v1 import admin_pb2, generation_pb2, model_pb2

_R = TypeVar("_R", bound=Message)
_T = TypeVar("_T", covariant=True)

GENERATION_SERVICE = "pageturner.v1.GenerationService"

NO_POLICIES: Mapping[str, PolicySpec] = MappingProxyType({})


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
    path = _path(generation_pb2.DESCRIPTOR, "GenerationService", "Generate")
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
    path = _path(generation_pb2.DESCRIPTOR, "GenerationService", "GenerateStream")
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
    path = _path(generation_pb2.DESCRIPTOR, "GenerationService", "Score")
    session = options.get("session", "")
    return Call(
        path, request, generation_pb2.ScoreResponse, from_scores, timeout, repeats=True, session=session
    )


def abort(request_ids: Iterable[str]) -> Call[generation_pb2.AbortResponse, Mapping[str, AbortOutcome]]:
    return Call(
        _path(generation_pb2.DESCRIPTOR, "GenerationService", "Abort"),
        build(generation_pb2.AbortRequest, request_ids=request_ids),
        generation_pb2.AbortResponse,
        lambda response: {one.request_id: ABORT_OUTCOMES[one.outcome] for one in response.results},
    )


def tokenize(
    prompt: PromptLike, model: str, add_special_tokens: bool
) -> Call[generation_pb2.TokenizeResponse, tuple[int, ...]]:
    return Call(
        _path(generation_pb2.DESCRIPTOR, "GenerationService", "Tokenize"),
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
        _path(generation_pb2.DESCRIPTOR, "GenerationService", "Tokenize"),
        build(generation_pb2.TokenizeRequest, model=model, prompt=to_prompt(prompt), return_prompt=True),
        generation_pb2.TokenizeResponse,
        lambda response: response.rendered_prompt,
        repeats=True,
    )


def detokenize(token_ids: Iterable[int], model: str) -> Call[generation_pb2.DetokenizeResponse, str]:
    return Call(
        _path(generation_pb2.DESCRIPTOR, "GenerationService", "Detokenize"),
        build(generation_pb2.DetokenizeRequest, model=model, token_ids=token_ids),
        generation_pb2.DetokenizeResponse,
        lambda response: response.text,
        repeats=True,
    )


def models() -> Call[model_pb2.ListModelsResponse, tuple[ModelInfo, ...]]:
    return Call(
        _path(model_pb2.DESCRIPTOR, "ModelService", "ListModels"),
        model_pb2.ListModelsRequest(),
        model_pb2.ListModelsResponse,
        lambda response: tuple(map(from_model, response.models)),
        repeats=True,
    )


def model(name: str) -> Call[model_pb2.GetModelResponse, ModelInfo]:
    return Call(
        _path(model_pb2.DESCRIPTOR, "ModelService", "GetModel"),
        build(model_pb2.GetModelRequest, name=name),
        model_pb2.GetModelResponse,
        lambda response: from_model(response.model),
        repeats=True,
    )


def server_info() -> Call[admin_pb2.GetServerInfoResponse, ServerInfo]:
    return Call(
        _path(admin_pb2.DESCRIPTOR, "AdminService", "GetServerInfo"),
        admin_pb2.GetServerInfoRequest(),
        admin_pb2.GetServerInfoResponse,
        from_server_info,
    )


def policies() -> Call[admin_pb2.GetPoliciesResponse, PoliciesInfo]:
    return Call(
        _path(admin_pb2.DESCRIPTOR, "AdminService", "GetPolicies"),
        admin_pb2.GetPoliciesRequest(),
        admin_pb2.GetPoliciesResponse,
        from_policies,
    )


def set_policies(
    policies: Mapping[str, PolicySpec],
    shadows: Mapping[str, PolicySpec | None],
    preset: str,
    expected_revision: int | None,
) -> Call[admin_pb2.SetPoliciesResponse, PoliciesInfo]:
    return Call(
        _path(admin_pb2.DESCRIPTOR, "AdminService", "SetPolicies"),
        build(
            admin_pb2.SetPoliciesRequest,
            policies=to_choices("policies", policies),
            shadows=to_choices("shadows", shadows),
            preset=preset,
            expected_revision=expected_revision,
        ),
        admin_pb2.SetPoliciesResponse,
        from_policies,
    )


def load() -> Call[admin_pb2.GetLoadResponse, SchedulerStats]:
    return Call(
        _path(admin_pb2.DESCRIPTOR, "AdminService", "GetLoad"),
        admin_pb2.GetLoadRequest(),
        admin_pb2.GetLoadResponse,
        lambda response: from_stats(response.load),
    )


def tenants(limit: int) -> Call[admin_pb2.ListTenantsResponse, TenantsReport]:
    return Call(
        _path(admin_pb2.DESCRIPTOR, "AdminService", "ListTenants"),
        build(admin_pb2.ListTenantsRequest, limit=limit),
        admin_pb2.ListTenantsResponse,
        from_tenants,
    )


def watch_load(interval_seconds: float) -> StreamCall[admin_pb2.WatchLoadResponse, SchedulerStats]:
    interval = check_number(interval_seconds, "interval_seconds")
    return StreamCall(
        _path(admin_pb2.DESCRIPTOR, "AdminService", "WatchLoad"),
        admin_pb2.WatchLoadRequest(interval_seconds=interval),
        admin_pb2.WatchLoadResponse,
        lambda response: from_stats(response.load),
    )


def drain(grace_seconds: float | None) -> Call[admin_pb2.DrainResponse, DrainOutcome]:
    return Call(
        _path(admin_pb2.DESCRIPTOR, "AdminService", "Drain"),
        build(admin_pb2.DrainRequest, grace_seconds=grace_seconds),
        admin_pb2.DrainResponse,
        lambda response: DrainOutcome(response.num_finished, response.num_aborted),
    )


def flight_record() -> StreamCall[admin_pb2.GetFlightRecordResponse, bytes]:
    """A stream of pieces of one file."""
    return StreamCall(
        _path(admin_pb2.DESCRIPTOR, "AdminService", "GetFlightRecord"),
        admin_pb2.GetFlightRecordRequest(),
        admin_pb2.GetFlightRecordResponse,
        lambda response: response.chunk,
    )


def list_requests(
    page_size: int | None,
    page_token: str,
    order: RequestOrder,
    states: Iterable[RequestState],
    tenant: str | None,
) -> Call[admin_pb2.ListRequestsResponse, RequestPage]:
    if order not in REQUEST_ORDERS:
        raise InvalidArgument("order", f"no order {order!r}; there are {', '.join(REQUEST_ORDERS)}")
    return Call(
        _path(admin_pb2.DESCRIPTOR, "AdminService", "ListRequests"),
        build(
            admin_pb2.ListRequestsRequest,
            page_size=page_size,
            page_token=page_token,
            order=REQUEST_ORDERS[order],
            states=[REQUEST_STATES[state] for state in states],
            tenant=tenant,
        ),
        admin_pb2.ListRequestsResponse,
        from_request_page,
    )


def abort_requests(
    request_ids: Iterable[str], tenant: str | None
) -> Call[admin_pb2.AbortRequestsResponse, Mapping[str, AbortOutcome]]:
    names = [build(admin_pb2.RequestName, request_id=name, tenant=tenant) for name in request_ids]
    return Call(
        _path(admin_pb2.DESCRIPTOR, "AdminService", "AbortRequests"),
        admin_pb2.AbortRequestsRequest(requests=names),
        admin_pb2.AbortRequestsResponse,
        lambda response: {one.request.request_id: ABORT_OUTCOMES[one.outcome] for one in response.results},
    )


def blocks() -> Call[admin_pb2.GetBlocksResponse, BlockPoolMap]:
    return Call(
        _path(admin_pb2.DESCRIPTOR, "AdminService", "GetBlocks"),
        admin_pb2.GetBlocksRequest(),
        admin_pb2.GetBlocksResponse,
        from_blocks,
    )


def prefix_summary() -> Call[admin_pb2.GetPrefixSummaryResponse, PrefixSummary]:
    return Call(
        _path(admin_pb2.DESCRIPTOR, "AdminService", "GetPrefixSummary"),
        admin_pb2.GetPrefixSummaryRequest(),
        admin_pb2.GetPrefixSummaryResponse,
        lambda response: from_prefix_summary(response.summary),
    )


def watch_prefix_summary(
    interval_seconds: float,
) -> StreamCall[admin_pb2.WatchPrefixSummaryResponse, PrefixSummary]:
    """A stream of whole summaries, put together of what changes."""
    interval = check_number(interval_seconds, "interval_seconds")
    return StreamCall(
        _path(admin_pb2.DESCRIPTOR, "AdminService", "WatchPrefixSummary"),
        admin_pb2.WatchPrefixSummaryRequest(interval_seconds=interval),
        admin_pb2.WatchPrefixSummaryResponse,
        PrefixNews().read,
    )


def activity() -> Call[admin_pb2.GetActivityResponse, Activity]:
    return Call(
        _path(admin_pb2.DESCRIPTOR, "AdminService", "GetActivity"),
        admin_pb2.GetActivityRequest(),
        admin_pb2.GetActivityResponse,
        from_activity,
    )


def load_adapter(name: str, path: str) -> Call[admin_pb2.LoadAdapterResponse, AdapterInfo]:
    return Call(
        _path(admin_pb2.DESCRIPTOR, "AdminService", "LoadAdapter"),
        build(admin_pb2.LoadAdapterRequest, name=name, path=path),
        admin_pb2.LoadAdapterResponse,
        lambda response: from_adapter(response.adapter),
    )


def unload_adapter(name: str, wait_seconds: float) -> Call[admin_pb2.UnloadAdapterResponse, int]:
    return Call(
        _path(admin_pb2.DESCRIPTOR, "AdminService", "UnloadAdapter"),
        build(admin_pb2.UnloadAdapterRequest, name=name, wait_seconds=wait_seconds),
        admin_pb2.UnloadAdapterResponse,
        lambda response: response.num_requests,
    )


def adapters() -> Call[admin_pb2.ListAdaptersResponse, tuple[AdapterInfo, ...]]:
    return Call(
        _path(admin_pb2.DESCRIPTOR, "AdminService", "ListAdapters"),
        admin_pb2.ListAdaptersRequest(),
        admin_pb2.ListAdaptersResponse,
        lambda response: tuple(map(from_adapter, response.adapters)),
    )


def check_health(service: str, timeout_seconds: float | None) -> Call[health_pb2.HealthCheckResponse, bool]:
    """Whether the server is ready for requests to this service."""
    return Call(
        _path(health_pb2.DESCRIPTOR, "Health", "Check"),
        build(health_pb2.HealthCheckRequest, service=service),
        health_pb2.HealthCheckResponse,
        lambda response: response.status == health_pb2.HealthCheckResponse.SERVING,
        to_timeout(timeout_seconds),
    )


def watch_health(timeout_seconds: float | None) -> StreamCall[health_pb2.HealthCheckResponse, bool]:
    """A stream that says, now and at every change, whether the server is ready for requests."""
    return StreamCall(
        _path(health_pb2.DESCRIPTOR, "Health", "Watch"),
        health_pb2.HealthCheckRequest(service=GENERATION_SERVICE),
        health_pb2.HealthCheckResponse,
        lambda response: response.status == health_pb2.HealthCheckResponse.SERVING,
        to_timeout(timeout_seconds),
        waits=True,
    )


def _path(file: FileDescriptor, service: str, method: str) -> str:
    found = file.services_by_name[service].methods_by_name[method]
    return f"/{found.containing_service.full_name}/{found.name}"
