"""The deployment that Ray's gRPC proxy calls: GenerationService, ModelService, what of AdminService concerns
all replicas, and health. Its methods have the names of the RPCs.

Each takes the request and Ray's copy of the call's context. Errors end the call as a server's would
(`statuses`); of an answer whose replica dies the client sees nothing (`answers`).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import structlog
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from pageturner.service.core.clock import MonotonicClock
from pageturner.service.logs import structured
from pageturner.service.rpc.stream_messages import StreamMessages
from pageturner.service.rpc.whole_answer import gathered
from pageturner.service.scale import merging
from pageturner.service.scale.answers import Answers
from pageturner.service.scale.call_metadata import session_of
from pageturner.service.scale.calls import Call, Failure, Refused, RouteHint, Sent
from pageturner.service.scale.entrance import Entrance
from pageturner.service.scale.health import ApplicationHealth
from pageturner.service.scale.news import News, Peers
from pageturner.service.scale.options import Settings
from pageturner.service.scale.prompts import PromptRoutings, Reading
from pageturner.service.scale.statuses import RpcContext, Serialized, end_with
from pageturner.v1 import admin_pb2, generation_pb2, model_pb2

READY_SECONDS = 2.0
"""How long replicas may take to say whether they are ready."""

_GENERATION, _MODEL, _ADMIN = (
    next(iter(module.DESCRIPTOR.services_by_name.values())).full_name
    for module in (generation_pb2, model_pb2, admin_pb2)
)
_PER_REPLICA = "it is about one replica, and there are several: see the chapter of service/scale"
_M = TypeVar("_M", bound=Message)


class Neighbours(Protocol):
    """What the ingress asks of the application's other processes (`on_ray.RayNeighbours`), by their
    handles."""

    def engines(self, handle: Any) -> Any:
        """A `RayReplicas` of the engines."""

    def coordinator(self, handle: Any) -> Any:
        """A `RayCoordinator`."""

    @property
    def own_name(self) -> str:
        """Of this process, as `open_streams` asks for it."""

    @property
    def ingresses(self) -> Callable[[], Peers] | None:
        """All ingresses; None where there is no other."""


class Ingress:
    """engines, coordinator: handles."""

    def __init__(self, settings: Settings, neighbours: Neighbours, engines: Any, coordinator: Any) -> None:
        loaded = settings.load()
        structured.configure(loaded.config.log)
        self._replicas = neighbours.engines(engines)
        self._coordinator = neighbours.coordinator(coordinator)
        self._news = News(uuid.uuid4().hex, neighbours.ingresses, asyncio.sleep)
        clock = MonotonicClock()
        self._answers = Answers(self._replicas, clock, asyncio.sleep, self._news.went)
        self._routings = PromptRoutings(settings.version, self._reading, clock)
        self._entrance = Entrance(loaded.config, neighbours.own_name, structlog.get_logger(), clock)
        self._health = ApplicationHealth(self._is_ready, asyncio.sleep)

    async def hear(self, teller: str, news: Sequence[Sent]) -> None:
        """What another ingress tells of its requests."""
        self._news.hear(teller, news)

    # GenerationService

    async def GenerateStream(  # noqa: N802 - Ray calls methods by the names of the RPCs, here and below
        self, request: generation_pb2.GenerateStreamRequest, grpc_context: RpcContext
    ) -> AsyncGenerator[Serialized, None]:
        request.request_id = request.request_id or uuid.uuid4().hex
        messages = StreamMessages(request.request_id)
        try:
            call = await self._entrance.admit(_GENERATION, request, grpc_context)
            hint = await self._hint(request, call, grpc_context)
            async with aclosing(self._answers.stream(request, call, hint)) as events:
                async for event in events:
                    yield Serialized(messages.message(event).SerializeToString())
        except Exception as error:
            end_with(grpc_context, self._entrance.failure(error, "GenerateStream", request.request_id))
            yield Serialized(b"")  # takes the context along

    async def Generate(  # noqa: N802
        self, request: generation_pb2.GenerateRequest, grpc_context: RpcContext
    ) -> generation_pb2.GenerateResponse:
        request.request_id = request.request_id or uuid.uuid4().hex

        async def generate(call: Call) -> generation_pb2.GenerateResponse:
            for received in request.resume.choices:
                received.finished = False  # the one answer tells how each choice ended
            streamed = generation_pb2.GenerateStreamRequest.FromString(request.SerializeToString())
            hint = await self._hint(streamed, call, grpc_context)
            async with aclosing(self._answers.stream(streamed, call, hint)) as events:
                return await gathered(events, request.request_id, max(1, request.sampling.n))

        return await self._entrance.unary(
            "Generate", _GENERATION, request, grpc_context, generation_pb2.GenerateResponse, generate
        )

    async def Score(  # noqa: N802
        self, request: generation_pb2.ScoreRequest, grpc_context: RpcContext
    ) -> generation_pb2.ScoreResponse:
        request.request_id = request.request_id or uuid.uuid4().hex

        async def score(call: Call) -> generation_pb2.ScoreResponse:
            hint = await self._hint(request, call, grpc_context)
            answer = await self._answers.ask("Score", request.SerializeToString(), call, hint)
            return generation_pb2.ScoreResponse.FromString(answer)

        return await self._entrance.unary(
            "Score", _GENERATION, request, grpc_context, generation_pb2.ScoreResponse, score
        )

    async def Abort(  # noqa: N802
        self, request: generation_pb2.AbortRequest, grpc_context: RpcContext
    ) -> generation_pb2.AbortResponse:
        async def abort(call: Call) -> generation_pb2.AbortResponse:
            answers = await self._of_all("Abort", request, call, generation_pb2.AbortResponse)
            return merging.aborted(request, answers)

        return await self._entrance.unary(
            "Abort", _GENERATION, request, grpc_context, generation_pb2.AbortResponse, abort
        )

    async def Tokenize(  # noqa: N802
        self, request: generation_pb2.TokenizeRequest, grpc_context: RpcContext
    ) -> generation_pb2.TokenizeResponse:
        return await self._of_any(
            "Tokenize", _GENERATION, request, grpc_context, generation_pb2.TokenizeResponse
        )

    async def Detokenize(  # noqa: N802
        self, request: generation_pb2.DetokenizeRequest, grpc_context: RpcContext
    ) -> generation_pb2.DetokenizeResponse:
        return await self._of_any(
            "Detokenize", _GENERATION, request, grpc_context, generation_pb2.DetokenizeResponse
        )

    # ModelService

    async def ListModels(  # noqa: N802
        self, request: model_pb2.ListModelsRequest, grpc_context: RpcContext
    ) -> model_pb2.ListModelsResponse:
        return await self._of_any("ListModels", _MODEL, request, grpc_context, model_pb2.ListModelsResponse)

    async def GetModel(  # noqa: N802
        self, request: model_pb2.GetModelRequest, grpc_context: RpcContext
    ) -> model_pb2.GetModelResponse:
        return await self._of_any("GetModel", _MODEL, request, grpc_context, model_pb2.GetModelResponse)

    # AdminService

    async def GetServerInfo(  # noqa: N802
        self, request: admin_pb2.GetServerInfoRequest, grpc_context: RpcContext
    ) -> admin_pb2.GetServerInfoResponse:
        return await self._of_any(
            "GetServerInfo", _ADMIN, request, grpc_context, admin_pb2.GetServerInfoResponse
        )

    async def GetLoad(  # noqa: N802
        self, request: admin_pb2.GetLoadRequest, grpc_context: RpcContext
    ) -> admin_pb2.GetLoadResponse:
        async def load(call: Call) -> admin_pb2.GetLoadResponse:
            return merging.load(await self._of_all("GetLoad", request, call, admin_pb2.GetLoadResponse))

        return await self._entrance.unary(
            "GetLoad", _ADMIN, request, grpc_context, admin_pb2.GetLoadResponse, load
        )

    async def GetPolicies(  # noqa: N802
        self, request: admin_pb2.GetPoliciesRequest, grpc_context: RpcContext
    ) -> admin_pb2.GetPoliciesResponse:
        return await self._of_any("GetPolicies", _ADMIN, request, grpc_context, admin_pb2.GetPoliciesResponse)

    async def SetPolicies(  # noqa: N802
        self, request: admin_pb2.SetPoliciesRequest, grpc_context: RpcContext
    ) -> admin_pb2.SetPoliciesResponse:
        async def change(call: Call) -> admin_pb2.SetPoliciesResponse:
            answer = await self._coordinator.set_policies(request.SerializeToString(), call)
            if isinstance(answer, Failure):
                raise answer.error()
            return admin_pb2.SetPoliciesResponse.FromString(answer)

        return await self._entrance.unary(
            "SetPolicies", _ADMIN, request, grpc_context, admin_pb2.SetPoliciesResponse, change
        )

    # grpc.health.v1.Health

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, grpc_context: RpcContext
    ) -> health_pb2.HealthCheckResponse:
        return await self._entrance.ended_well(
            "Check", grpc_context, health_pb2.HealthCheckResponse, self._health.check(request.service)
        )

    async def List(  # noqa: N802
        self, request: health_pb2.HealthListRequest, grpc_context: RpcContext
    ) -> health_pb2.HealthListResponse:
        return await self._entrance.ended_well(
            "List", grpc_context, health_pb2.HealthListResponse, self._health.every()
        )

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, grpc_context: RpcContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        async with aclosing(self._health.watch(request.service)) as changes:
            async for each in changes:
                yield each

    async def _is_ready(self) -> bool:
        return bool(await self._replicas.has_one("is_ready", bool, READY_SECONDS))

    # How a call is made

    async def _hint(
        self,
        request: generation_pb2.GenerateStreamRequest | generation_pb2.ScoreRequest,
        call: Call,
        context: RpcContext,
    ) -> RouteHint:
        routing = await self._routings.current()
        session = session_of(tuple(context.invocation_metadata()))
        return replace(await routing.hint(request, call, session), news=self._news.heard())

    async def _reading(self) -> tuple[Reading, bytes]:
        """How any replica reads prompts, and the key that all hash under."""
        agreement = await self._coordinator.join()
        return await self._replicas.one("reading"), agreement.prefix_key

    async def _of_any(
        self, method: str, service: str, request: Message, context: RpcContext, response: type[_M]
    ) -> _M:
        async def ask(call: Call) -> _M:
            answer = await self._answers.ask(method, request.SerializeToString(), call, RouteHint())
            return response.FromString(answer)

        return await self._entrance.unary(method, service, request, context, response, ask)

    async def _of_all(self, method: str, request: Message, call: Call, response: type[_M]) -> list[_M]:
        """The answers of all replicas that gave one. Raises what the first that refused said."""
        answers = []
        for each in await self._replicas.ask_all(method, request.SerializeToString(), call):
            if isinstance(each, Failure):
                raise each.error()
            answers.append(response.FromString(each))
        return answers


def _not_offered(name: str) -> Any:
    refusal = Failure.unimplemented(f"{name} is not offered here: {_PER_REPLICA}")

    async def refuse(self: Ingress, request: Message, grpc_context: RpcContext) -> Message:
        async def refused(_call: Call) -> Message:
            raise Refused(refusal)

        # Empty, as any is: gRPC drops it.
        return await self._entrance.unary(
            name, _ADMIN, request, grpc_context, admin_pb2.GetLoadResponse, refused
        )

    async def refuse_stream(
        self: Ingress, request: Message, grpc_context: RpcContext
    ) -> AsyncIterator[Message]:
        yield await refuse(self, request, grpc_context)

    return refuse, refuse_stream


for _method in admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods:
    if not hasattr(Ingress, _method.name):
        setattr(Ingress, _method.name, _not_offered(_method.name)[_method.server_streaming])
