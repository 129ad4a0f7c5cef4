"""Readings of servers that never were, for the live views: with few requests, many, none."""

from __future__ import annotations

from dataclasses import replace

from pageturner.policies.views import Rates
from pageturner.service.client import (
    Activity,
    BlockOwner,
    BlockPoolMap,
    BlockUse,
    RequestInfo,
    RequestPage,
    RequestState,
)
from pageturner.service.client.values import RequestOrder
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.engine.api import EngineHealth, Latencies, ServerInfo
from pageturner.service.top.readings import MAX_LISTED, Away, Reading
from support.fake_engine import POLICIES

BOUNDS = (0.01, 0.1, 1.0)

SERVER = ServerInfo("0.1.0", 1.5, 60.0, 16, 64, 0, 1, 32, 512, "cpu", Rates(), {}, model_name="tiny")


def request(number: int, **changes: object) -> RequestInfo:
    """A running one of a team."""
    plain = RequestInfo(
        request_id=f"req-{number:04d}",
        tenant=f"team-{number % 3}",
        number=number,
        state=RequestState.RUNNING,
        queue_position=0,
        priority=0,
        num_choices=1,
        num_prompt_tokens=100 + number,
        num_cached_prompt_tokens=16,
        num_uncomputed_tokens=1,
        num_output_tokens=number % 50 + 1,
        max_tokens=200,
        num_blocks=8,
        num_host_blocks=0,
        num_preemptions=0,
        age_seconds=2.0,
        queue_seconds=0.25,
        first_token_seconds=0.3,
    )
    return replace(plain, **changes)  # type: ignore[arg-type] # fields by their names


def waiting(number: int, position: int) -> RequestInfo:
    """One that has not begun."""
    return request(
        number,
        state=RequestState.WAITING,
        queue_position=position,
        num_output_tokens=0,
        num_blocks=0,
        first_token_seconds=None,
    )


def blocks(num_blocks: int, owners: list[RequestInfo]) -> BlockPoolMap:
    """Each owner holds its blocks in a run; a tenth of the rest is cached."""
    uses, places = bytearray([BlockUse.FREE]) * num_blocks, [0] * num_blocks
    start = 0
    for place, owner in enumerate(owners):
        end = min(num_blocks, start + owner.num_blocks)
        for block_id in range(start, end):
            uses[block_id], places[block_id] = BlockUse.LIVE, place + 1
        start = end
    for block_id in range(start, start + (num_blocks - start) // 10):
        uses[block_id] = BlockUse.EVICTABLE
    named = tuple(BlockOwner(one.request_id, one.tenant, one.number) for one in owners)
    return BlockPoolMap(bytes(uses), b"".join(place.to_bytes(2, "little") for place in places), named)


def reading(
    at: float = 0.0,
    *,
    num_running: int = 2,
    num_waiting: int = 0,
    num_blocks: int = 64,
    num_tokens: int = 0,
    health: EngineHealth = EngineHealth.SERVING,
    uptime: float | None = None,
    age: float = 0.0,
) -> Reading:
    """num_tokens: generated since the server's start."""
    running = [request(number) for number in range(num_running)]
    requests = [*running, *(waiting(num_running + one, one + 1) for one in range(num_waiting))]
    pool = blocks(num_blocks, running)
    held = pool.uses.count(BlockUse.LIVE)
    return Reading(
        at,
        SERVER,
        SchedulerStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_blocks=num_blocks,
            num_blocks_used=held,
            num_blocks_evictable=pool.uses.count(BlockUse.EVICTABLE),
            num_blocks_free=pool.uses.count(BlockUse.FREE),
        ),
        Activity(
            health,
            at if uptime is None else uptime,
            num_generation_tokens_total=num_tokens,
            time_to_first_token=Latencies(BOUNDS, (0, num_tokens, num_tokens, num_tokens), 0.0),
            inter_token_latency=Latencies(BOUNDS, (0, 0, 0, 0), 0.0),
        ),
        POLICIES,
        RequestPage(tuple(requests[:MAX_LISTED]), "", len(requests), age),
        replace(pool, age_seconds=age),
    )


class ScriptedSource:
    """Hands out readings one after the other, the last one again and again; remembers what it was asked."""

    def __init__(self, *told: Reading | Away) -> None:
        self.told = list(told)
        self.aborted: list[str] = []
        self.orders: list[RequestOrder] = []

    async def read(self, order: RequestOrder = "schedule") -> Reading | Away:
        self.orders.append(order)
        return self.told.pop(0) if len(self.told) > 1 else self.told[0]

    async def abort(self, request_id: str) -> str:
        self.aborted.append(request_id)
        return "ended"

    async def story(self, request_id: str) -> list[str]:
        return [f"{request_id} was admitted at once"]
