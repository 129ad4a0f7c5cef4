"""What an operator sees of the requests that live, over the wire, and how one is ended."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.fake_engine import PAUSE, FakeEngine, accepted, finished
from support.real_service import real_service
from support.serving import serving

from pageturner.service.client import BlockOwner, RequestInfo, RequestState
from pageturner.service.client.values import RequestOrder
from pageturner.service.core.inspection import BlockUse, SchedulerInspection
from pageturner.service.engine.api import AbortOutcome, EngineHealth, Inspection
from pageturner.service.errors import InvalidArgument, RequestAborted
from pageturner.v1 import admin_pb2 as pb
from pageturner.v1.admin_pb2_grpc import AdminServiceStub

PLAIN = RequestInfo(
    request_id="a",
    tenant="t0",
    number=0,
    state=RequestState.RUNNING,
    queue_position=0,
    priority=-3,
    num_choices=2,
    num_prompt_tokens=40,
    num_cached_prompt_tokens=16,
    num_uncomputed_tokens=1,
    num_output_tokens=7,
    max_tokens=64,
    num_blocks=3,
    num_host_blocks=0,
    num_preemptions=1,
    age_seconds=2.5,
    queue_seconds=0.25,
    first_token_seconds=0.5,
    deadline_seconds=9.5,
)


def _many(count: int) -> tuple[RequestInfo, ...]:
    return tuple(
        replace(
            PLAIN,
            request_id=f"r{number}",
            tenant=f"t{number % 2}",
            number=count - number,
            state=RequestState.RUNNING if number < 2 else RequestState.WAITING,
            queue_position=max(0, number - 1),
            num_blocks=number * 7 % 5,
            num_preemptions=number % 3,
        )
        for number in range(count)
    )


async def test_every_field_of_a_request_crosses_the_wire() -> None:
    bare = replace(
        PLAIN,
        request_id="b",
        state=RequestState.SWAPPED,
        num_blocks=0,
        num_host_blocks=4,
        first_token_seconds=None,
        deadline_seconds=None,
        is_paused=True,
        is_guarded=True,
    )
    engine = FakeEngine()
    engine.inspection = Inspection(SchedulerInspection((PLAIN, bare)), age_seconds=12.5)
    async with serving(engine) as served:
        page = await served.client.list_requests()
        assert page.requests == (PLAIN, bare)
        assert (page.total_size, page.next_page_token, page.age_seconds) == (2, "", 12.5)


async def test_pages_cover_every_request_once_in_the_order_that_is_asked_for() -> None:
    engine, requests = FakeEngine(), _many(23)
    engine.inspection = Inspection(SchedulerInspection(requests))
    expected: dict[RequestOrder, list[RequestInfo]] = {
        "schedule": list(requests),
        "age": sorted(requests, key=lambda r: r.number),
        "blocks": sorted(requests, key=lambda r: (-r.num_blocks, r.number)),
        "tokens": sorted(requests, key=lambda r: r.number),
        "preemptions": sorted(requests, key=lambda r: (-r.num_preemptions, r.number)),
    }
    async with serving(engine) as served:
        for order, listed in expected.items():
            token, found = "", list[RequestInfo]()
            for _ in range(3):
                page = await served.client.list_requests(page_size=10, page_token=token, order=order)
                found += page.requests
                token = page.next_page_token
            assert (found, token) == (listed, ""), order
        only = await served.client.list_requests(states=[RequestState.RUNNING], tenant="t1")
        assert [request.request_id for request in only.requests] == ["r1"]
        late = await served.client.list_requests(page_token="40")
        assert late.requests == (), "they have ended meanwhile"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.ListRequestsRequest(page_size=0), "page_size"),
        (pb.ListRequestsRequest(page_token="-1"), "page_token"),
        (pb.ListRequestsRequest(page_token="9" * 30), "page_token"),
        (pb.ListRequestsRequest(page_token="\N{SUPERSCRIPT TWO}"), "page_token"),
        (pb.ListRequestsRequest(states=[pb.REQUEST_STATE_RUNNING, 99]), "states[1]"),  # type: ignore[list-item] # wrong on purpose
        (pb.ListRequestsRequest(order=99), "order"),  # type: ignore[arg-type] # wrong on purpose
    ],
)
async def test_a_list_that_cannot_be_is_refused_by_its_field(
    request_: pb.ListRequestsRequest, field: str
) -> None:
    from pageturner.service.rpc.inspection import list_requests

    with pytest.raises(InvalidArgument) as caught:
        list_requests(Inspection(SchedulerInspection()), request_)
    assert caught.value.field == field


async def test_an_operator_ends_anothers_request() -> None:
    engine = FakeEngine(lambda s, t: [accepted(s, t), PAUSE, finished(s, 1, 0)])
    engine.inspection = Inspection(SchedulerInspection((PLAIN,)))
    async with serving(engine) as served:
        call = asyncio.create_task(served.client.generate("x", request_id="a"))
        await engine.reached("paused a")
        outcomes = await served.client.abort_requests("a", "b")
        assert outcomes == {"a": AbortOutcome.ABORTED, "b": AbortOutcome.NOT_FOUND}
        with pytest.raises(RequestAborted, match="ended by an operator"):
            await call
        assert await served.client.abort_requests("a") == {"a": AbortOutcome.ALREADY_FINISHED}
        stub = AdminServiceStub(served.channel)
        too_many = [pb.RequestName(request_id="x")] * 1025
        for names in ([], too_many):
            with pytest.raises(Exception, match="names, not in"):
                await stub.AbortRequests(pb.AbortRequestsRequest(requests=names))


async def test_blocks_name_their_owners_and_figures_add_up() -> None:
    async with real_service(num_blocks=12, max_num_seqs=4) as service:
        service.hold_steps()
        call = asyncio.create_task(service.client.generate("x" * 6, request_id="a", tenant="t", max_tokens=9))
        await service.until(lambda: service.num_live == 1)
        await service.run_steps(4)
        looking = asyncio.create_task(service.engine.inspect())
        await asyncio.sleep(0)  # it has asked
        await service.run_steps(1)
        await looking
        blocks = await service.client.blocks()
        assert blocks.requests == (BlockOwner("a", "t", 0),)
        assert len(blocks.uses) * 2 == len(blocks.owners) == 24
        assert blocks.owners.count(1) == blocks.uses.count(BlockUse.LIVE) > 0
        service.release_steps()
        completion = await call
        await service.until_idle()
        activity = await service.client.activity()
    assert activity.health is EngineHealth.SERVING
    assert activity.num_generation_tokens_total == completion.usage.num_output_tokens
    assert activity.num_prompt_tokens_total == completion.usage.num_prompt_tokens
    assert activity.finished_total == {"ok": 1}
    assert activity.time_to_first_token.cumulative[-1] == 1
    assert len(activity.time_to_first_token.cumulative) == len(activity.time_to_first_token.bounds) + 1
    assert activity.uptime_seconds > 0
