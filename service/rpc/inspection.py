"""What lives and what was done, from the engine's values to the wire; a page of the requests that live."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pageturner.service.engine.api import (
    Activity,
    EngineHealth,
    Inspection,
    Latencies,
    PrefixChange,
    PrefixSummary,
    RequestInfo,
    RequestState,
)
from pageturner.service.errors import InvalidArgument
from pageturner.v1 import admin_pb2 as pb

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000

STATES: Mapping[RequestState, pb.RequestState] = {
    RequestState.WAITING: pb.REQUEST_STATE_WAITING,
    RequestState.RUNNING: pb.REQUEST_STATE_RUNNING,
    RequestState.SWAPPED: pb.REQUEST_STATE_SWAPPED,
}

HEALTH: Mapping[EngineHealth, pb.EngineHealth] = {
    EngineHealth.STARTING: pb.ENGINE_HEALTH_STARTING,
    EngineHealth.SERVING: pb.ENGINE_HEALTH_SERVING,
    EngineHealth.STALLED: pb.ENGINE_HEALTH_STALLED,
    EngineHealth.DRAINING: pb.ENGINE_HEALTH_DRAINING,
    EngineHealth.DEAD: pb.ENGINE_HEALTH_DEAD,
}

_ORDERS: Mapping[int, Callable[[RequestInfo], Any] | None] = {
    pb.REQUEST_ORDER_UNSPECIFIED: None,
    pb.REQUEST_ORDER_SCHEDULE: None,
    pb.REQUEST_ORDER_AGE: lambda request: request.number,
    pb.REQUEST_ORDER_BLOCKS: lambda request: (-request.num_blocks, request.number),
    pb.REQUEST_ORDER_TOKENS: lambda request: (
        -request.num_prompt_tokens - request.num_output_tokens,
        request.number,
    ),
    pb.REQUEST_ORDER_PREEMPTIONS: lambda request: (-request.num_preemptions, request.number),
}


def list_requests(inspection: Inspection, request: pb.ListRequestsRequest) -> pb.ListRequestsResponse:
    """The page that is asked for. Raises InvalidArgument."""
    start = _start(request.page_token)
    page_size = request.page_size if request.HasField("page_size") else DEFAULT_PAGE_SIZE
    if not page_size:
        raise InvalidArgument("page_size", "a page of no requests")
    if request.order not in _ORDERS:
        raise InvalidArgument("order", f"no order {request.order}")
    listed = _selected(inspection.scheduler.requests, request)
    key = _ORDERS[request.order]
    if key is not None:
        listed.sort(key=key)
    end = start + min(page_size, MAX_PAGE_SIZE)
    # Of those that wait far behind it is known that they are there.
    is_of_all = not request.states and not request.HasField("tenant")
    num_untold = inspection.scheduler.num_requests - len(inspection.scheduler.requests)
    return pb.ListRequestsResponse(
        requests=map(from_request, listed[start:end]),
        next_page_token=str(end) if end < len(listed) else "",
        total_size=len(listed) + max(0, num_untold if is_of_all else 0),
        age_seconds=inspection.age_seconds,
    )


def _start(page_token: str) -> int:
    """The place of a page's first request."""
    if not page_token:
        return 0
    if not (page_token.isascii() and page_token.isdigit() and len(page_token) <= 9):
        raise InvalidArgument("page_token", "not one that this server gave out")
    return int(page_token)


def _selected(requests: Iterable[RequestInfo], asked: pb.ListRequestsRequest) -> list[RequestInfo]:
    known = {number: state for state, number in STATES.items()}
    for position, number in enumerate(asked.states):
        if number not in known:
            raise InvalidArgument(f"states[{position}]", f"no state {number}")
    states = {known[number] for number in asked.states} or set(STATES)
    tenant = asked.tenant if asked.HasField("tenant") else None
    return [
        request
        for request in requests
        if request.state in states and (tenant is None or request.tenant == tenant)
    ]


def from_request(request: RequestInfo) -> pb.LiveRequest:
    return pb.LiveRequest(
        request_id=request.request_id,
        tenant=request.tenant,
        number=request.number,
        state=STATES[request.state],
        queue_position=request.queue_position,
        priority=request.priority,
        num_choices=request.num_choices,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_prompt_tokens=request.num_cached_prompt_tokens,
        num_uncomputed_tokens=request.num_uncomputed_tokens,
        num_output_tokens=request.num_output_tokens,
        max_tokens=request.max_tokens,
        num_blocks=request.num_blocks,
        num_host_blocks=request.num_host_blocks,
        num_preemptions=request.num_preemptions,
        age_seconds=request.age_seconds,
        queue_seconds=request.queue_seconds,
        first_token_seconds=request.first_token_seconds,
        deadline_seconds=request.deadline_seconds,
        paused=request.is_paused,
        guarded=request.is_guarded,
    )


def from_blocks(inspection: Inspection) -> pb.GetBlocksResponse:
    blocks = inspection.scheduler.block_map()
    return pb.GetBlocksResponse(
        uses=blocks.uses,
        owners=blocks.owners,
        requests=(
            pb.BlockOwner(request_id=request.request_id, tenant=request.tenant, number=request.number)
            for request in inspection.scheduler.requests
        ),
        age_seconds=inspection.age_seconds,
    )


def from_prefix_summary(summary: PrefixSummary) -> pb.PrefixSummary:
    return pb.PrefixSummary(
        revision=summary.revision,
        block_size=summary.block_size,
        key_id=summary.key_id,
        fingerprints=summary.fingerprints,
        is_truncated=summary.is_truncated,
    )


def from_prefix_change(change: PrefixChange) -> pb.PrefixChange:
    return pb.PrefixChange(revision=change.revision, added=change.added, removed=change.removed)


def from_activity(activity: Activity) -> pb.GetActivityResponse:
    return pb.GetActivityResponse(
        health=HEALTH[activity.health],
        uptime_seconds=activity.uptime_seconds,
        prompt_tokens_total=activity.num_prompt_tokens_total,
        generation_tokens_total=activity.num_generation_tokens_total,
        requests_refused_total=activity.num_refused_total,
        requests_finished_total=activity.finished_total,
        time_to_first_token=_from_latencies(activity.time_to_first_token),
        inter_token_latency=_from_latencies(activity.inter_token_latency),
        request_latency=_from_latencies(activity.request_latency),
        queue_time=_from_latencies(activity.queue_time),
        health_reason=activity.health_reason,
    )


def _from_latencies(latencies: Latencies) -> pb.Latencies:
    return pb.Latencies(bounds=latencies.bounds, cumulative=latencies.cumulative, sum=latencies.sum)
