"""Tenants over the wire: whose request an abort reaches, and what an operator sees of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from support.fake_engine import PAUSE, FakeEngine, accepted, finished
from support.identities import MAIL, OPERATOR, SEARCH, authenticator, bearer
from support.real_service import real_service
from support.serving import serving

from pageturner.service.client import NEVER, Client, Credentials, SyncClient
from pageturner.service.engine.tenants import Cause, TenantReport, TenantsReport
from pageturner.service.errors import InvalidArgument
from pageturner.service.identity import TenantLimits
from pageturner.v1 import generation_pb2 as pb
from pageturner.v1.generation_pb2_grpc import GenerationServiceStub

LIMITS = TenantLimits(4, 5000, 60_000, 256, -5, 0)
REPORTS = (
    TenantReport("search", LIMITS, 3, 2, 700, -12.5, {Cause.TOKENS_PER_MINUTE: 2, Cause.PRIORITY: 1}),
    TenantReport("mail", TenantLimits(), 0, 0, 0, None, {}),
)


async def test_an_abort_over_the_wire_reaches_the_callers_own_request() -> None:
    engine = FakeEngine(lambda request, ids: [accepted(request, ids), PAUSE, finished(request, 1, 0)])
    async with serving(engine, authenticator=authenticator()) as served:
        stub = GenerationServiceStub(served.channel)
        request = pb.GenerateRequest(prompt=pb.Prompt(text="x"), request_id="mine")
        running = asyncio.ensure_future(stub.Generate(request, metadata=bearer(SEARCH)))
        await engine.reached("paused mine")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request, metadata=bearer(SEARCH))
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        others = asyncio.ensure_future(stub.Generate(request, metadata=bearer(MAIL)))
        await engine.reached("paused mine")
        abort = pb.AbortRequest(request_ids=["mine", "mail/mine"])

        async def outcomes(caller: tuple[tuple[str, str], ...]) -> list[pb.AbortOutcome]:
            return [each.outcome for each in (await stub.Abort(abort, metadata=caller)).results]

        nothing, done = pb.ABORT_OUTCOME_NOT_FOUND, pb.ABORT_OUTCOME_ABORTED
        assert await outcomes(bearer(OPERATOR)) == [nothing, nothing]
        assert await outcomes(bearer(SEARCH)) == [done, nothing]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running
        assert caught.value.code() is grpc.StatusCode.ABORTED
        engine.resume("mine")
        assert (await others).request_id == "mine"


async def test_an_operator_sees_what_tenants_hold_and_were_refused() -> None:
    engine = FakeEngine()
    engine.tenant_reports = REPORTS
    async with serving(engine) as served:
        everything = await served.client.tenants()
        assert everything == TenantsReport(REPORTS, 2, {Cause.QUEUE_SHARE: 3})
        assert (await served.client.tenants(1)).tenants == REPORTS[:1]
        for limit in (0, 1001):
            with pytest.raises(InvalidArgument, match="limit"):
                await served.client.tenants(limit)

        def ask() -> TenantsReport:
            with SyncClient(f"127.0.0.1:{served.port}") as client:
                return client.tenants()

        assert await asyncio.to_thread(ask) == everything


async def test_text_that_is_read_is_on_its_tenants_account(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"authenticator": authenticator()}
    async with real_service(max_model_len=1024, num_blocks=1024, server_options=options) as service:
        owners: list[str] = []
        queue = service.engine._prompts._queue
        run = queue.run

        async def noted(size: int, work: Callable[[], Any], owner: str = "") -> Any:
            owners.append(owner)
            return await run(size, work, owner)

        monkeypatch.setattr(queue, "run", noted)
        credentials = Credentials(token=SEARCH.text)
        async with Client(service.target, credentials=credentials, retry=NEVER) as client:
            text = "the quick brown fox " * 150
            ids = await client.tokenize(text)
            await client.detokenize(ids * 10)
            await client.generate(text, max_tokens=1)
        assert owners == ["search"] * 3
