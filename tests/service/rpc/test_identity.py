"""Who may call what, over a real server: every method of every service, every kind of caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2
from support.fake_engine import PAUSE, FakeEngine, accepted, finished
from support.identities import (
    FILE,
    MAIL,
    NOW,
    OPERATOR,
    SEARCH,
    SEARCH_OLD,
    STRANGER,
    authenticator,
    bearer,
    token,
)
from support.serving import Served, capturing_logger, serving

from pageturner.service.auth.identities import Identities, parse_identities
from pageturner.service.auth.proof import Authenticator, Presented
from pageturner.service.core.clock import ManualClock
from pageturner.service.engine.metrics import Method, Metrics
from pageturner.service.errors import PermissionDenied
from pageturner.service.identity import ANONYMOUS
from pageturner.service.rpc import callers, from_wire
from pageturner.service.rpc.interceptors import CallInterceptor
from pageturner.service.rpc.line_budget import BURST, LineBudget
from pageturner.service.rpc.reflection import V1, V1ALPHA
from pageturner.service.rpc.server import OWN_SERVICES
from pageturner.v1 import admin_pb2, generation_pb2, model_pb2, transfer_pb2
from pageturner.v1 import generation_pb2 as pb
from pageturner.v1.admin_pb2_grpc import AdminServiceStub
from pageturner.v1.generation_pb2_grpc import GenerationServiceStub

FOR_ADMINS = ("pageturner.v1.AdminService", "pageturner.v1.TransferService")
HEALTH = "grpc.health.v1.Health"
Metadata = tuple[tuple[str, str], ...]


def methods() -> Iterator[tuple[str, str]]:
    """Every method of ours, whatever is added, and those of reflection."""
    for file in (generation_pb2, model_pb2, admin_pb2, transfer_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield service.full_name, method.name
    for service_name in (V1, V1ALPHA):
        yield service_name, "ServerReflectionInfo"


METHODS = tuple(sorted(methods(), key=lambda each: each[1] == "Drain"))
"""Drain is last: what comes after it finds no server."""
STRANGERS: tuple[Metadata, ...] = (
    (),
    bearer(STRANGER),
    bearer(SEARCH_OLD),
    bearer(token("search", "guess")),
    (("authorization", SEARCH.text),),
    (*bearer(SEARCH), *bearer(SEARCH)),
)


async def code_of(served: Served, service: str, method: str, metadata: Metadata) -> grpc.StatusCode:
    """What a call ends with that sends a message of no bytes, as any client may."""
    open_call: Any = served.channel.unary_stream(f"/{service}/{method}")
    call = open_call(b"", metadata=metadata, timeout=30)
    try:
        async for _ in call:
            break
        call.cancel()
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_the_methods_are_those_of_every_service() -> None:
    assert {service for service, _ in METHODS} == OWN_SERVICES | {V1, V1ALPHA}
    assert len(METHODS) > 12


async def test_no_method_serves_a_caller_that_proves_nobody() -> None:
    async with serving(FakeEngine(), authenticator=authenticator()) as served:
        for service, method in METHODS:
            for metadata in STRANGERS:
                code = await code_of(served, service, method, metadata)
                assert code is grpc.StatusCode.UNAUTHENTICATED, (service, method, metadata)


async def test_admin_methods_are_refused_to_a_tenant_and_no_other_is() -> None:
    async with serving(FakeEngine(), authenticator=authenticator()) as served:
        for service, method in METHODS:
            code = await code_of(served, service, method, bearer(SEARCH))
            assert code is not grpc.StatusCode.UNAUTHENTICATED
            assert (code is grpc.StatusCode.PERMISSION_DENIED) == (service in FOR_ADMINS), (service, method)
        for service, method in sorted(METHODS, key=lambda each: each[1] == "Drain"):  # after which it is over
            code = await code_of(served, service, method, bearer(OPERATOR))
            assert code not in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)


@pytest.mark.parametrize("skipped", METHODS[:1] + METHODS[-2:-1], ids=lambda each: each[1])
async def test_a_check_that_skips_one_service_is_noticed(
    skipped: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug: one service more is open to all."""
    monkeypatch.setattr(callers, "OPEN_SERVICES", callers.OPEN_SERVICES | {skipped[0]})
    with pytest.raises(AssertionError):
        await test_no_method_serves_a_caller_that_proves_nobody()


async def test_an_admin_check_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "ADMIN_SERVICES", frozenset())
    with pytest.raises(AssertionError):
        await test_admin_methods_are_refused_to_a_tenant_and_no_other_is()


async def test_the_caller_is_proved_before_a_byte_of_the_request_is_parsed() -> None:
    async with serving(FakeEngine(), authenticator=authenticator()) as served:
        call: Any = served.channel.unary_unary("/pageturner.v1.GenerationService/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\xff\xff\xff")
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\xff\xff\xff", metadata=bearer(SEARCH))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("service", ["pageturner.v1.GenerationService", FOR_ADMINS[0]])
async def test_nothing_of_a_strangers_request_is_taken_in(service: str) -> None:
    """Megabytes of each call would be held before it is refused: gRPC reads the message of a unary handler
    before the handler is called, and that of a streaming one when it asks."""

    async def continuation(_: object) -> Any:
        async def behaviour(request: object, context: object) -> None:
            raise AssertionError("it was called")

        return grpc.unary_unary_rpc_method_handler(behaviour)

    logger, _ = capturing_logger()
    gatekeeper = callers.Gatekeeper(authenticator())
    interceptor = CallInterceptor(logger, ManualClock(), Metrics(), gatekeeper, write_timeout_seconds=60.0)
    for metadata, is_taken_in in (((), False), (bearer(STRANGER), False), (bearer(OPERATOR), True)):

        class Details:
            method = f"/{service}/Method"
            invocation_metadata = metadata

        details: Any = Details()
        handler: Any = await interceptor.intercept_service(continuation, details)
        assert (not handler.request_streaming) == is_taken_in


async def test_a_large_request_of_a_stranger_is_refused_like_a_small_one() -> None:
    async with serving(FakeEngine(), authenticator=authenticator()) as served:
        stub = GenerationServiceStub(served.channel)
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="x" * (1 << 20))))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="x")), metadata=bearer(SEARCH))


async def test_a_refusal_tells_neither_the_cause_nor_the_credential() -> None:
    answers = set()
    async with serving(FakeEngine(), authenticator=authenticator()) as served:
        for metadata in STRANGERS:
            stub = GenerationServiceStub(served.channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text="x")), metadata=metadata)
            trailing = dict(tuple(caught.value.trailing_metadata() or ()))
            answers.add((caught.value.details(), trailing["grpc-status-details-bin"]))
        assert len(answers) == 1, "all causes read alike, to the byte"
        ((_, packed),) = answers
        assert isinstance(packed, bytes)
        (detail,) = Status.FromString(packed).details
        info = ErrorInfo()
        assert detail.Unpack(info)
        assert (info.reason, dict(info.metadata)) == ("UNAUTHENTICATED", {})
        lines = [entry for entry in served.log.entries if entry["event"] == "rpc"]
        assert [line["cause"] for line in lines] == [
            "missing", "unknown_token", "expired", "wrong_secret", "malformed", "malformed",
        ]  # fmt: skip
        assert [line.get("claimed") for line in lines] == [
            None, None, "token old", "token search", None, None,
        ]  # fmt: skip
        assert not any("tenant" in line or "credential" in line for line in lines)
        assert served.metrics.snapshot().callers_refused_total == {
            "missing": 1, "unknown_token": 1, "expired": 1, "wrong_secret": 1, "malformed": 2,
        }  # fmt: skip


def test_lines_beyond_the_budget_are_counted_and_told_later() -> None:
    clock = ManualClock()
    budget = LineBudget(clock, per_second=2.0, burst=3)
    assert [budget.take() for _ in range(5)] == [0, 0, 0, None, None]
    clock.advance(0.4)
    assert budget.take() is None
    clock.advance(0.1)
    assert [budget.take(), budget.take()] == [3, None]
    clock.advance(3600.0)
    assert [budget.take() for _ in range(4)] == [1, 0, 0, None], "it holds no more than a burst"


async def test_a_flood_of_strangers_is_counted_and_does_not_fill_the_log() -> None:
    async with serving(FakeEngine(), authenticator=authenticator()) as served:
        stub = GenerationServiceStub(served.channel)

        async def ask() -> None:
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Tokenize(pb.TokenizeRequest())

        for _ in range(10):
            await asyncio.gather(*(ask() for _ in range(30)))
        await stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="x")), metadata=bearer(SEARCH))
        lines = [line for line in served.log.entries if line["event"] == "rpc"]
        assert lines[-1]["tenant"] == "search", "a tenant's line is told all the same"
        told = [line for line in lines if line["log_level"] == "info" and "cause" in line]
        assert BURST <= len(told) < 200
        assert served.metrics.snapshot().callers_refused_total == {"missing": 300}


class _CountingTracer:
    """Makes no spans, and knows for which methods it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def begin(self, method: Method, metadata: object) -> None:
        self.asked.append(method.grpc_method)


async def test_a_stranger_adds_nothing_to_a_trace() -> None:
    tracer: Any = _CountingTracer()
    async with serving(FakeEngine(), authenticator=authenticator(), tracer=tracer) as served:
        stub = GenerationServiceStub(served.channel)
        request = pb.TokenizeRequest(prompt=pb.Prompt(text="x"))
        named = ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Tokenize(request, metadata=(named,))
        assert tracer.asked == []
        assert "trace_id" not in served.log.entries[-1]
        await stub.Tokenize(request, metadata=(named, *bearer(SEARCH)))
        assert tracer.asked == ["Tokenize"]


async def test_health_is_open_to_probes() -> None:
    async with serving(FakeEngine(), authenticator=authenticator()) as served:
        check: Any = served.channel.unary_unary(
            f"/{HEALTH}/Check", response_deserializer=health_pb2.HealthCheckResponse.FromString
        )
        assert (await check(b"")).status == health_pb2.HealthCheckResponse.SERVING
        watch: Any = served.channel.unary_stream(f"/{HEALTH}/Watch")
        async for message in watch(b""):
            assert message == b"\x08\x01"
            break


async def test_a_request_runs_on_the_account_of_its_caller() -> None:
    engine = FakeEngine()
    async with serving(engine, authenticator=authenticator()) as served:
        stub = GenerationServiceStub(served.channel)
        prompt = pb.Prompt(text="x")
        await stub.Generate(pb.GenerateRequest(prompt=prompt), metadata=bearer(SEARCH))
        await stub.Generate(pb.GenerateRequest(prompt=prompt, tenant="mail"), metadata=bearer(MAIL))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(pb.GenerateRequest(prompt=prompt, tenant="mail"), metadata=bearer(SEARCH))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        stream = pb.GenerateStreamRequest(prompt=prompt, tenant="search")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [message async for message in stub.GenerateStream(stream, metadata=bearer(OPERATOR))]
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED, "an admin is no other tenant either"
        assert served.metrics.snapshot().callers_refused_total == {"other_tenant": 2}
    assert [(each.tenant, each.identity.tenant) for each in engine.requests] == [
        ("search", "search"), ("mail", "mail"),
    ]  # fmt: skip
    assert engine.requests[0].identity.credential == "token search"
    assert engine.requests[0].identity.limits.max_concurrent_requests == 4


RIGHT = from_wire.tenant_of
SIMILAR = ("mail", "Search", "SEARCH", "search ", " search", "searc", "search2", "sear\u0441h", "*")
"""Other tenants than "search", of which the seventh has a letter of another alphabet."""


@pytest.mark.parametrize("stated", SIMILAR)
def test_a_tenant_of_a_similar_name_is_another(stated: str) -> None:
    caller = authenticator().prove(Presented([f"Bearer {SEARCH.text}"]))
    assert from_wire.tenant_of("", caller) == from_wire.tenant_of("search", caller) == "search"
    with pytest.raises(PermissionDenied):
        from_wire.tenant_of(stated, caller)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda stated, caller: stated or caller.tenant,
        lambda stated, caller: stated if stated.startswith(caller.tenant) else caller.tenant,
        lambda stated, caller: caller.tenant if stated in caller.tenant else RIGHT(stated, caller),
        lambda stated, caller: caller.tenant,
    ],
    ids=["the request's own", "by its beginning", "a part of it", "no refusal"],
)
async def test_a_wrong_check_of_the_tenant_is_noticed(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_wire, "tenant_of", wrong)
    caught = 0
    try:
        await test_a_request_runs_on_the_account_of_its_caller()
    except (AssertionError, pytest.fail.Exception):
        caught += 1
    for stated in SIMILAR:
        try:
            test_a_tenant_of_a_similar_name_is_another(stated)
        except (AssertionError, pytest.fail.Exception):
            caught += 1
    assert caught


async def test_without_authentication_a_request_names_its_tenant_and_all_is_served() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        stub = GenerationServiceStub(served.channel)
        request = pb.GenerateRequest(prompt=pb.Prompt(text="x"), tenant="anybody")
        await stub.Generate(request, metadata=bearer(STRANGER))
        await AdminServiceStub(served.channel).GetLoad(admin_pb2.GetLoadRequest())
    assert engine.requests[0].tenant == "anybody"
    assert engine.requests[0].identity is ANONYMOUS


async def test_callers_at_once_keep_their_own_identity() -> None:
    """What one call bound is not what another reads, whatever they wait for in between."""
    engine = FakeEngine(lambda request, ids: [accepted(request, ids), PAUSE, finished(request, 1, 0)])
    async with serving(engine, authenticator=authenticator()) as served:
        stub = GenerationServiceStub(served.channel)
        held = {"s": SEARCH, "m": MAIL, "o": OPERATOR}
        running = [
            asyncio.ensure_future(
                stub.Generate(
                    pb.GenerateRequest(prompt=pb.Prompt(text="x"), request_id=name), metadata=bearer(each)
                )
            )
            for name, each in held.items()
        ]
        for name in held:
            await engine.reached(f"paused {name}")
        for name in reversed(held):
            engine.resume(name)
        await asyncio.gather(*running)
        lines = {line["request_id"]: line for line in served.log.entries if line["event"] == "rpc"}
        assert {name: line["tenant"] for name, line in lines.items()} == {
            "s": "search", "m": "mail", "o": "operators",
        }  # fmt: skip
        assert {line["credential"] for line in lines.values()} == {
            "token search", "token mail", "token operator",
        }  # fmt: skip
    assert {each.request_id: each.identity.tenant for each in engine.requests} == {
        "s": "search", "m": "mail", "o": "operators",
    }  # fmt: skip


async def test_a_revoked_token_begins_no_call_and_its_stream_goes_on() -> None:
    engine = FakeEngine(lambda request, ids: [accepted(request, ids), PAUSE, finished(request, 1, 0)])
    in_force = [parse_identities(FILE)]
    changing = Authenticator(lambda: in_force[0], lambda: NOW)
    async with serving(engine, authenticator=changing) as served:
        stub = GenerationServiceStub(served.channel)
        request = pb.GenerateStreamRequest(prompt=pb.Prompt(text="x"), request_id="r")
        stream: AsyncIterator[pb.GenerateStreamResponse] = stub.GenerateStream(
            request, metadata=bearer(SEARCH)
        ).__aiter__()
        await anext(stream)
        await engine.reached("paused r")
        in_force[0] = Identities()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="x")), metadata=bearer(SEARCH))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        engine.resume("r")
        assert [message.WhichOneof("event") async for message in stream] == ["finished"]


async def test_a_revoked_admin_sees_no_more_of_a_stream_without_end() -> None:
    in_force = [parse_identities(FILE)]
    changing = Authenticator(lambda: in_force[0], lambda: NOW)
    async with serving(FakeEngine(), authenticator=changing, min_watch_seconds=0.001) as served:
        request = admin_pb2.WatchLoadRequest(interval_seconds=0.001)
        watch = AdminServiceStub(served.channel).WatchLoad(request, metadata=bearer(OPERATOR)).__aiter__()
        await anext(watch)
        in_force[0] = Identities()

        async def follow() -> None:
            async for _ in watch:
                pass

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(follow(), 30)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_who_changes_policies_is_told_to_the_log() -> None:
    engine = FakeEngine()
    async with serving(engine, authenticator=authenticator()) as served:
        request = admin_pb2.SetPoliciesRequest(policies={"queue": admin_pb2.PolicyChoice(name="priority")})
        await AdminServiceStub(served.channel).SetPolicies(request, metadata=bearer(OPERATOR))
    assert engine.policy_changes[0].origin.endswith(", token operator")


def test_the_caller_is_not_known_outside_of_a_call() -> None:
    with pytest.raises(LookupError):
        callers.current_caller()
