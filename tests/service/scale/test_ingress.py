"""The ingress on replicas in this process: what its clients are told is what one server would tell them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2
from support.fake_engine import PAUSE, FakeEngine, accepted, echo
from support.patience import until
from support.real_service import real_service
from support.scripted import recording_logger

from pageturner.service.auth.tokens import new_token
from pageturner.service.client.credentials import DEADLINE_KEY
from pageturner.service.client.failures import is_temporary
from pageturner.service.core.clock import ManualClock
from pageturner.service.engine.api import GenerationRequest
from pageturner.service.errors import (
    DeadlineExceeded,
    InvalidArgument,
    ModelNotFound,
    NoReplica,
    PageturnerError,
    QueueFull,
    Unauthenticated,
)
from pageturner.service.rpc.options import ServerOptions
from pageturner.service.rpc.status import UnknownStatus
from pageturner.service.scale.agreement import Agreement
from pageturner.service.scale.calls import Begun, Call, Failure, RouteHint, Sent
from pageturner.service.scale.entrance import LOOK_SECONDS, Entrance
from pageturner.service.scale.ingress import Ingress
from pageturner.service.scale.local_services import LocalServices
from pageturner.service.scale.news import NEWS_SECONDS, Peers
from pageturner.service.scale.options import read_arguments
from pageturner.service.scale.prompts import Reading
from pageturner.service.scale.statuses import RpcContext
from pageturner.v1 import admin_pb2, generation_pb2, model_pb2


class InProcessReplicas:
    """As `on_ray.RayReplicas`, of engines that follow scripts."""

    def __init__(self, engines: Sequence[FakeEngine]) -> None:
        logger, _ = recording_logger()
        self._services = {
            f"replica-{number}": LocalServices(engine, ServerOptions(), logger, lambda: "drawn")
            for number, engine in enumerate(engines)
        }
        self._engines = list(engines)
        self.hints: list[RouteHint] = []

    def _chosen(self, hint: RouteHint) -> str:
        self.hints.append(hint)
        names = list(self._services)
        if not names:
            raise NoReplica("no replica is there")
        return next((name for name in names if name not in hint.avoid), names[0])

    async def follow(
        self, method: str, request: bytes, call: Call, hint: RouteHint
    ) -> AsyncGenerator[Begun | bytes | Failure, None]:
        chosen = self._chosen(hint)
        yield Begun(chosen)
        async with aclosing(self._services[chosen].follow(method, request, call)) as parts:
            async for part in parts:
                yield part

    async def ask(
        self, method: str, request: bytes, call: Call, hint: RouteHint
    ) -> tuple[str, bytes | Failure]:
        chosen = self._chosen(hint)
        return chosen, await self._services[chosen].ask(method, request, call)

    async def ask_all(self, method: str, request: bytes, call: Call) -> list[bytes | Failure]:
        return [await each.ask(method, request, call) for each in self._services.values()]

    async def one(self, method_name: str, *arguments: object) -> Any:
        assert method_name == "reading"
        model = replace(self._engines[0].models()[0], has_chat_template=False)
        return Reading(model, None, 4, shares_prefixes=False)

    async def has_one(self, method_name: str, holds: Callable[[Any], bool], seconds: float) -> bool:
        assert method_name == "is_ready"
        return any(holds(engine.condition.is_ready) for engine in self._engines)


class FakeCoordinator:
    async def join(self) -> Agreement:
        return Agreement(b"key")


@dataclass
class FakeNeighbours:
    """In place of Ray's: handles are what is asked already."""

    ingresses: Callable[[], Peers] | None = None
    own_name: str = ""

    def engines(self, handle: Any) -> Any:
        return handle

    def coordinator(self, handle: Any) -> Any:
        return handle


class FakeContext:
    """Ray's, with what the proxy would take over."""

    def __init__(self, **metadata: str) -> None:
        self._metadata = tuple(metadata.items())
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.trailers: dict[str, Any] = {}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def peer(self) -> str:
        return "ipv4:192.0.2.1:5"

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailing_metadata: Sequence[tuple[str, Any]]) -> None:
        self.trailers = dict(trailing_metadata)

    def error(self) -> PageturnerError:
        """As a client reads it."""
        packed = self.trailers["grpc-status-details-bin"]
        assert self.code is not None
        assert Status.FromString(packed).code == self.code.value[0]
        return Failure(packed).error()


def ingress_of(*engines: FakeEngine, **arguments: Any) -> tuple[Ingress, InProcessReplicas]:
    replicas = InProcessReplicas(engines)
    return Ingress(read_arguments(arguments), FakeNeighbours(), replicas, FakeCoordinator()), replicas


def request_of(*ids: int, **fields: Any) -> generation_pb2.GenerateStreamRequest:
    prompt = generation_pb2.Prompt(token_ids=generation_pb2.TokenIds(ids=ids))
    return generation_pb2.GenerateStreamRequest(prompt=prompt, **fields)


async def messages_of(
    ingress: Ingress, request: generation_pb2.GenerateStreamRequest, context: RpcContext
) -> list[generation_pb2.GenerateStreamResponse]:
    stream = ingress.GenerateStream(request, context)
    found = [each async for each in stream]  # read late, as Ray does
    return [generation_pb2.GenerateStreamResponse.FromString(each.SerializeToString()) for each in found]


async def test_a_stream_has_its_events_in_order_under_an_id_that_the_ingress_drew() -> None:
    ingress, replicas = ingress_of(FakeEngine())
    context = FakeContext(session_id="chat 7")
    messages = await messages_of(
        ingress, request_of(72, 105, 33, 33, 33, sampling={"max_tokens": 3}), context
    )
    assert [each.WhichOneof("event") for each in messages] == [
        "accepted",
        *["delta"] * 3,
        "choice_finished",
        "finished",
    ]
    assert [each.sequence_number for each in messages] == list(range(6))
    assert len({each.request_id for each in messages}) == 1
    assert messages[0].request_id
    assert "".join(each.delta.text for each in messages) == "Hi!"
    assert context.code is None
    (hint,) = replicas.hints
    assert hint.session == "chat 7"
    assert (hint.num_prompt_tokens, len(hint.digests)) == (5, 1)


async def test_a_refusal_comes_with_its_details_behind_an_empty_message() -> None:
    ingress, _ = ingress_of(FakeEngine())
    context = FakeContext()
    (empty,) = await messages_of(ingress, request_of(72, sampling={"top_p": 3.0}), context)
    assert empty.WhichOneof("event") is None
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    error = context.error()
    assert isinstance(error, InvalidArgument)
    assert error.field == "sampling.top_p"

    context = FakeContext()
    unary = generation_pb2.GenerateRequest.FromString(
        request_of(72, sampling={"top_p": 3.0}).SerializeToString()
    )
    assert await ingress.Generate(unary, context) == generation_pb2.GenerateResponse()
    assert isinstance(context.error(), InvalidArgument)


async def test_full_replicas_refuse_with_a_time_to_wait_and_one_with_room_is_found() -> None:
    def full(seconds: float) -> FakeEngine:
        def refuse(request: GenerationRequest, ids: tuple[int, ...]) -> list[Exception]:
            raise QueueFull("full", seconds)

        return FakeEngine(refuse)

    ingress, _ = ingress_of(full(3.0), FakeEngine())
    context = FakeContext()
    assert len(await messages_of(ingress, request_of(72, sampling={"max_tokens": 1}), context)) == 4
    assert context.code is None

    ingress, _replicas = ingress_of(full(3.0), full(2.0))
    await messages_of(ingress, request_of(72), context)
    assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    retry = RetryInfo()
    assert any(
        each.Unpack(retry) for each in Status.FromString(context.trailers["grpc-status-details-bin"]).details
    )
    assert retry.retry_delay.seconds == 2


async def test_tokens_that_come_within_a_pause_are_one_message() -> None:
    pauses: list[asyncio.Event] = []

    async def pause() -> None:
        pauses.append(asyncio.Event())
        await pauses[-1].wait()

    async with real_service() as service:
        logger, _ = recording_logger()
        services = LocalServices(service.engine, ServerOptions(), logger, lambda: "drawn", pause)
        request = request_of(66, 67, sampling={"max_tokens": 9, "ignore_eos": True, "seed": 1})
        parts = services.follow("GenerateStream", request.SerializeToString(), Call())
        service.hold_steps()
        accepted_part = await anext(parts)
        service.allow_steps(1)
        first = await anext(parts)
        service.release_steps()
        assert not pauses, "neither the acceptance nor the first token waits"
        rest = asyncio.ensure_future(anext(parts))
        await service.until(lambda: bool(pauses) and not service.num_live)
        pauses[0].set()
        messages = [
            generation_pb2.GenerateStreamResponse.FromString(part)
            for part in (accepted_part, first, await rest)
            if isinstance(part, bytes)
        ]
        assert [each.WhichOneof("event") for each in messages] == ["accepted", "delta", "delta"]
        assert len(messages[1].delta.token_ids) + len(messages[2].delta.token_ids) == 9
        assert messages[2].delta.token_ids
        await parts.aclose()


async def test_a_whole_answer_is_gathered_from_the_stream() -> None:
    ingress, _ = ingress_of(FakeEngine())
    request = generation_pb2.GenerateRequest.FromString(
        request_of(72, 105, sampling={"max_tokens": 2, "n": 2}, request_id="mine").SerializeToString()
    )
    context = FakeContext()
    response = await ingress.Generate(request, context)
    assert (response.request_id, [choice.text for choice in response.choices]) == ("mine", ["Hi", "Hi"])
    assert response.usage.output_tokens == 4
    assert context.code is None


async def test_an_abort_reaches_whichever_replica_has_the_request() -> None:
    def held(request: GenerationRequest, ids: tuple[int, ...]) -> list[Any]:
        return [accepted(request, ids), PAUSE]

    engines = FakeEngine(), FakeEngine(held)
    ingress, replicas = ingress_of(*engines)
    replicas._services = dict(reversed(replicas._services.items()))  # the held one is chosen
    stream = ingress.GenerateStream(request_of(72, request_id="mine"), FakeContext())
    await anext(stream)
    answer = await ingress.Abort(generation_pb2.AbortRequest(request_ids=["mine", "nobody's"]), FakeContext())
    assert [each.outcome for each in answer.results] == [
        generation_pb2.ABORT_OUTCOME_ABORTED,
        generation_pb2.ABORT_OUTCOME_NOT_FOUND,
    ]
    await stream.aclose()


async def test_a_client_that_leaves_ends_the_request() -> None:
    def endless(request: GenerationRequest, ids: tuple[int, ...]) -> list[Any]:
        return [accepted(request, ids), PAUSE]

    engine = FakeEngine(endless)
    ingress, _ = ingress_of(engine)
    stream = ingress.GenerateStream(request_of(72), FakeContext())
    await anext(stream)
    assert engine.load is not None
    await stream.aclose()
    assert engine.condition.num_live == 0


async def test_deadlines_come_by_metadata_and_bad_ones_are_refused() -> None:
    seen: list[float | None] = []

    def look(request: GenerationRequest, ids: tuple[int, ...]) -> Any:
        seen.append(request.deadline_seconds)
        return echo(request, ids)

    ingress, _ = ingress_of(FakeEngine(look))
    await messages_of(
        ingress, request_of(72, sampling={"max_tokens": 1}), FakeContext(**{DEADLINE_KEY: "2.5"})
    )
    await messages_of(ingress, request_of(72, sampling={"max_tokens": 1}), FakeContext())
    assert seen[0] is not None
    assert 0 < seen[0] <= 2.5
    assert seen[1] is None
    context = FakeContext(**{DEADLINE_KEY: "0"})
    await messages_of(ingress, request_of(72), context)
    assert isinstance(context.error(), DeadlineExceeded)
    for bad in ("nan", "-1", "soon", "inf"):
        context = FakeContext(**{DEADLINE_KEY: bad})
        await messages_of(ingress, request_of(72), context)
        assert isinstance(context.error(), InvalidArgument), bad


async def test_models_figures_and_health_are_those_of_the_replicas() -> None:
    engines = FakeEngine(), FakeEngine()
    ingress, _ = ingress_of(*engines)
    models = await ingress.ListModels(model_pb2.ListModelsRequest(), FakeContext())
    assert [model.name for model in models.models] == [engines[0].models()[0].name]
    context = FakeContext()
    await ingress.GetModel(model_pb2.GetModelRequest(name="another"), context)
    assert isinstance(context.error(), ModelNotFound)
    load = (await ingress.GetLoad(admin_pb2.GetLoadRequest(), FakeContext())).load
    alone = engines[0].load()
    assert load.num_blocks == 2 * alone.num_blocks
    assert load.is_ready
    check = await ingress.Check(health_pb2.HealthCheckRequest(), FakeContext())
    assert check.status == health_pb2.HealthCheckResponse.SERVING
    for engine in engines:
        engine.die()
    check = await ingress.Check(health_pb2.HealthCheckRequest(), FakeContext())
    assert check.status == health_pb2.HealthCheckResponse.NOT_SERVING
    context = FakeContext()
    await ingress.Check(health_pb2.HealthCheckRequest(service="nobody's"), context)
    assert context.code is grpc.StatusCode.NOT_FOUND


async def test_methods_of_one_replica_are_refused_by_name() -> None:
    ingress: Any = ingress_of(FakeEngine())[0]
    for service in admin_pb2.DESCRIPTOR.services_by_name.values():
        assert all(hasattr(Ingress, method.name) for method in service.methods)
    context = FakeContext()
    await ingress.GetBlocks(admin_pb2.GetBlocksRequest(), context)
    assert context.code is grpc.StatusCode.UNIMPLEMENTED
    assert "GetBlocks" in context.details
    context = FakeContext()
    assert [each async for each in ingress.WatchLoad(admin_pb2.WatchLoadRequest(), context)]
    assert context.code is grpc.StatusCode.UNIMPLEMENTED


async def test_callers_are_proved_by_the_ingress(tmp_path: Any) -> None:
    """Before they are told anything, be it that a method is not offered."""
    file = tmp_path / "identities.toml"
    file.write_text("")
    ingress: Any = ingress_of(FakeEngine(), auth={"identities": str(file)})[0]
    context = FakeContext()
    (_empty,) = await messages_of(ingress, request_of(72), context)
    assert isinstance(context.error(), Unauthenticated)
    context = FakeContext()
    await ingress.GetBlocks(admin_pb2.GetBlocksRequest(), context)
    assert isinstance(context.error(), Unauthenticated)


async def test_tokens_that_are_new_or_revoked_are_so_while_the_ingress_runs(tmp_path: Any) -> None:
    file, clock, token = tmp_path / "identities.toml", ManualClock(), new_token()
    file.write_text("")
    loaded = read_arguments({"auth": {"identities": str(file)}}).load()
    entrance = Entrance(loaded.config, "", recording_logger()[0], clock)
    context = FakeContext(authorization=f"Bearer {token.text}")

    async def admitted() -> Call:
        clock.advance(LOOK_SECONDS)
        return await entrance.admit("pageturner.v1.GenerationService", request_of(1), context)

    with pytest.raises(Unauthenticated):
        await admitted()
    file.write_text(
        f'[tenants.search]\ntokens = [{{ id = "{token.id}", sha256 = "{token.digest.hex()}" }}]\n'
    )
    assert (await admitted()).caller.tenant == "search"
    file.write_text("# nobody\n")
    with pytest.raises(Unauthenticated):
        await admitted()


async def test_a_request_beyond_the_servers_bound_is_refused_as_grpc_does() -> None:
    ingress, replicas = ingress_of(FakeEngine(), server={"max_request_bytes": "64KiB"})
    request = request_of(*range(40_000))
    context = FakeContext()
    (_empty,) = await messages_of(ingress, request, context)
    assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"({request.ByteSize()} vs. {64 << 10})" in context.details
    error = context.error()
    assert isinstance(error, UnknownStatus), "as of one server: no error of ours"
    assert not is_temporary(error)
    context = FakeContext()
    long = generation_pb2.TokenizeRequest(prompt={"text": "x" * (65 << 10)})
    await ingress.Tokenize(long, context)
    assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not replicas.hints, "no replica was troubled"


class BothIngresses:
    """In place of a broadcast to all ingresses."""

    def __init__(self) -> None:
        self.ingresses: list[Ingress] = []

    async def all(self, method_name: str, *arguments: Any, seconds: float) -> list[Any]:
        return [await getattr(each, method_name)(*arguments) for each in self.ingresses]


async def test_an_ingress_learns_with_its_next_request_what_another_has_sent() -> None:
    both, replicas = BothIngresses(), InProcessReplicas((FakeEngine(),))
    both.ingresses = [
        Ingress(read_arguments({}), FakeNeighbours(lambda: both), replicas, FakeCoordinator()) for _ in "12"
    ]
    first, second = both.ingresses
    await messages_of(first, request_of(*range(9)), FakeContext())
    await asyncio.sleep(2 * NEWS_SECONDS)
    await messages_of(second, request_of(1), FakeContext())
    await messages_of(second, request_of(1), FakeContext())
    await messages_of(first, request_of(1), FakeContext())
    sent, heard, no_more, own = replicas.hints
    fingerprints = b"".join(digest[:4] for digest in sent.digests)
    assert heard.news == (Sent("replica-0", 4, fingerprints),)
    assert len(fingerprints) == 8
    assert no_more.news == own.news == (), "each is heard once, and nothing of its own"


async def test_news_that_can_not_be_told_harm_no_stream() -> None:
    """As while Ray's controller is away."""
    both, replicas, num_asked = BothIngresses(), InProcessReplicas((FakeEngine(),)), 0

    def peers() -> Peers:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            raise RuntimeError("planted")
        return both

    first = Ingress(read_arguments({}), FakeNeighbours(lambda: peers()), replicas, FakeCoordinator())
    second = Ingress(read_arguments({}), FakeNeighbours(), replicas, FakeCoordinator())
    both.ingresses = [second]
    for asked in (1, 2):
        context = FakeContext()
        await messages_of(first, request_of(*range(9)), context)
        assert context.code is None
        await until(lambda asked=asked: num_asked == asked)  # type: ignore[misc]
    await until(lambda: bool(second._news._heard))
