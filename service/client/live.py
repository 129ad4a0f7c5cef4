"""What lives on a server and what was done there, from the wire."""

from __future__ import annotations

from collections.abc import Mapping

from pageturner.service.client.values import BlockOwner, BlockPoolMap, RequestOrder, RequestPage
from pageturner.service.core.prefix_summary import PrefixChange, PrefixSummary
from pageturner.service.engine.api import Activity, EngineHealth, Latencies, RequestInfo, RequestState
from pageturner.v1 import admin_pb2 as pb

REQUEST_STATES: Mapping[RequestState, pb.RequestState] = {
    RequestState.WAITING: pb.REQUEST_STATE_WAITING,
    RequestState.RUNNING: pb.REQUEST_STATE_RUNNING,
    RequestState.SWAPPED: pb.REQUEST_STATE_SWAPPED,
}
_STATES = {number: state for state, number in REQUEST_STATES.items()}

REQUEST_ORDERS: Mapping[RequestOrder, pb.RequestOrder] = {
    "schedule": pb.REQUEST_ORDER_SCHEDULE,
    "age": pb.REQUEST_ORDER_AGE,
    "blocks": pb.REQUEST_ORDER_BLOCKS,
    "tokens": pb.REQUEST_ORDER_TOKENS,
    "preemptions": pb.REQUEST_ORDER_PREEMPTIONS,
}

_HEALTH = {
    pb.ENGINE_HEALTH_STARTING: EngineHealth.STARTING,
    pb.ENGINE_HEALTH_SERVING: EngineHealth.SERVING,
    pb.ENGINE_HEALTH_STALLED: EngineHealth.STALLED,
    pb.ENGINE_HEALTH_DRAINING: EngineHealth.DRAINING,
    pb.ENGINE_HEALTH_DEAD: EngineHealth.DEAD,
}


def from_request_page(response: pb.ListRequestsResponse) -> RequestPage:
    """A state that this client does not know counts as waiting."""
    return RequestPage(
        tuple(map(_from_request, response.requests)),
        response.next_page_token,
        response.total_size,
        response.age_seconds,
    )


def _from_request(request: pb.LiveRequest) -> RequestInfo:
    return RequestInfo(
        request.request_id,
        request.tenant,
        request.number,
        _STATES.get(request.state, RequestState.WAITING),
        request.queue_position,
        request.priority,
        request.num_choices,
        request.num_prompt_tokens,
        request.num_cached_prompt_tokens,
        request.num_uncomputed_tokens,
        request.num_output_tokens,
        request.max_tokens,
        request.num_blocks,
        request.num_host_blocks,
        request.num_preemptions,
        request.age_seconds,
        request.queue_seconds,
        request.first_token_seconds if request.HasField("first_token_seconds") else None,
        request.deadline_seconds if request.HasField("deadline_seconds") else None,
        request.paused,
        request.guarded,
    )


def from_blocks(response: pb.GetBlocksResponse) -> BlockPoolMap:
    owners = tuple(BlockOwner(one.request_id, one.tenant, one.number) for one in response.requests)
    return BlockPoolMap(response.uses, response.owners, owners, response.age_seconds)


def from_activity(response: pb.GetActivityResponse) -> Activity:
    """A health that this client does not know counts as stalled."""
    return Activity(
        _HEALTH.get(response.health, EngineHealth.STALLED),
        response.uptime_seconds,
        response.prompt_tokens_total,
        response.generation_tokens_total,
        response.requests_refused_total,
        dict(response.requests_finished_total),
        _from_latencies(response.time_to_first_token),
        _from_latencies(response.inter_token_latency),
        _from_latencies(response.request_latency),
        _from_latencies(response.queue_time),
        response.health_reason,
    )


def _from_latencies(latencies: pb.Latencies) -> Latencies:
    return Latencies(tuple(latencies.bounds), tuple(latencies.cumulative) or (0,), latencies.sum)


def from_prefix_summary(summary: pb.PrefixSummary) -> PrefixSummary:
    return PrefixSummary(
        summary.revision,
        max(1, summary.block_size),
        summary.key_id,
        summary.fingerprints,
        summary.is_truncated,
    )


class PrefixNews:
    """Reads the messages of one watch, each as the whole summary that it leads to."""

    def __init__(self) -> None:
        self._told = PrefixSummary()

    def read(self, message: pb.WatchPrefixSummaryResponse) -> PrefixSummary | None:
        """None for a message of a kind that this client does not know."""
        kind = message.WhichOneof("news")
        if kind is None:
            return None
        if kind == "whole":
            self._told = from_prefix_summary(message.whole)
        else:
            change = message.change
            self._told = self._told.apply(PrefixChange(change.revision, change.added, change.removed))
        return self._told
