"""Tells policies that keep a memory what has happened, as `policies.events` defines it.

Nothing here costs more than a question while no policy in force listens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pageturner.policies.events import (
    PolicyEvent,
    RequestEnded,
    RequestQueued,
    RequestStarted,
    StepServed,
    TenantShare,
)
from pageturner.service.core.outputs import Event, SchedulerOutput, TokenEvent
from pageturner.service.core.request import Request, RequestStatus
from pageturner.service.core.scheduling.state import SchedulerState


def tell_queued(state: SchedulerState, request: Request, *, is_first: bool) -> None:
    """Before its queue key is asked for."""
    if state.policy_host.listens:
        state.policy_host.fold(_queued(state, request, is_first))


def tell_started(state: SchedulerState, request: Request, num_cached_tokens: int, *, is_first: bool) -> None:
    if state.policy_host.listens:
        state.policy_host.fold(_started(state, request, num_cached_tokens, is_first))


def tell_ended(state: SchedulerState, request: Request) -> None:
    if state.policy_host.listens:
        state.policy_host.fold(RequestEnded(state.now, request.request_id, request.new.tenant))


def live_history(state: SchedulerState) -> list[PolicyEvent]:
    """The live requests as a memory that begins now is told of them, in order of acceptance."""
    events: list[PolicyEvent] = []
    for request in state.requests.values():
        events.append(_queued(state, request, request.admitted_at is None))
        if request.status is RequestStatus.RUNNING:
            events.append(_started(state, request, 0, False))
    return events


class StepTally:
    """What a step did for each tenant. Made before `update` takes the results, told after."""

    def __init__(self, state: SchedulerState, output: SchedulerOutput) -> None:
        self._now = state.now
        self._tenants: dict[str, str] = {}
        self._prompt: Counter[str] = Counter()
        self._recomputed: Counter[str] = Counter()
        self._beams: Counter[str] = Counter()
        self._searching: set[str] = set()
        for part in output.scheduled:
            sequence = state.sequences.get(part.seq_id)
            if sequence is None:
                continue
            request = sequence.request
            tenant = self._tenants[request.request_id] = request.new.tenant
            if request.beams is not None:  # what is told of a search says little of what it took
                self._searching.add(request.request_id)
                self._beams[tenant] += bool(part.samples)
            before, end = sequence.num_ever_computed, part.end
            self._recomputed[tenant] += max(0, min(end, before) - part.start)
            self._prompt[tenant] += max(0, min(end, sequence.num_given_tokens) - max(part.start, before))
            if sequence.epoch != part.epoch:  # void, but computed: computing it once more is doing it again
                sequence.num_ever_computed = max(before, end)

    def served(self, events: Iterable[Event]) -> StepServed:
        """events: what the step's update put out."""
        outputs = self._beams
        for event in events:
            if isinstance(event, TokenEvent) and event.request_id not in self._searching:
                outputs[self._tenants[event.request_id]] += len(event.tokens)
        shares = (
            TenantShare(tenant, self._prompt[tenant], outputs[tenant], self._recomputed[tenant])
            for tenant in sorted(set(self._tenants.values()))
        )
        return StepServed(self._now, tuple(shares))


def _queued(state: SchedulerState, request: Request, is_first: bool) -> RequestQueued:
    new = request.new
    return RequestQueued(state.now, new.request_id, new.tenant, request.num_prompt_tokens, is_first)


def _started(
    state: SchedulerState, request: Request, num_cached_tokens: int, is_first: bool
) -> RequestStarted:
    new, num_prompt_tokens = request.new, request.num_prompt_tokens
    return RequestStarted(
        state.now, new.request_id, new.tenant, num_prompt_tokens, num_cached_tokens, is_first
    )
