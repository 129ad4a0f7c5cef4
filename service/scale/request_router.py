"""Ray's request router of the engines, which asks a routing policy of ours. One a process with a handle."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from random import SystemRandom
from typing import Any

import structlog
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pageturner.policies import registry
from pageturner.service.errors import NoReplica
from pageturner.service.routing.router import Router
from pageturner.service.scale.calls import RouteHint
from pageturner.service.scale.reports import ReplicaReport
from pageturner.service.scale.request_routing import RequestRouting


class PolicyRouter(RequestRouter):  # type: ignore[misc] # Ray's types are not read
    """Offers Ray the replicas in the policy's order; Ray itself finds out who has died and who is full.

    All of the routing is touched on the event loop of Ray's router alone; ends and deaths are told on threads
    of Ray's.
    """

    def initialize_state(self, *, policy: str, options: Mapping[str, Any]) -> None:
        """Called by Ray with what `app` states."""
        logger = structlog.get_logger()
        router = Router(
            registry.create("routing", policy, options),
            SystemRandom().randrange,
            on_fault=lambda note: logger.warning("routing_policy_fault", note=str(note)),
        )
        self._routing = RequestRouting(router, uuid.uuid4().hex)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Told by Ray when replicas come, go, or have reported."""
        self._routing.update(
            {
                each.replica_id.unique_id: ReplicaReport.from_plain(each.routing_stats or {})
                for each in replicas
            }
        )
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._event_loop.call_soon_threadsafe(self._routing.lost, replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_id = {each.replica_id.unique_id: each for each in candidate_replicas}
        if pending_request is None:
            return [candidate_replicas]
        hint = pending_request.kwargs.get("hint", RouteHint())
        key = pending_request.metadata.internal_request_id
        try:
            order, told = self._routing.order(key, hint)
        except NoReplica:
            return [candidate_replicas]
        if "hint" in pending_request.kwargs:
            pending_request.kwargs["hint"] = told
        # A request that is cancelled while it waits for a replica is told of in no other way.
        pending_request.future.add_done_callback(
            lambda future: self._routing.ended(key) if future.cancelled() else None
        )
        pending_request.routing_context.should_backoff = True
        return [[by_id[each]] for each in order if each in by_id]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._routing.went_to(pending_request.metadata.internal_request_id, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._event_loop.call_soon_threadsafe(self._routing.ended, internal_request_id)
