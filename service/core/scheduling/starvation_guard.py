"""Chooses the one request that no policy can hold back: the guarded one, by which something always ends."""

from __future__ import annotations

from functools import partial

from pageturner.service.core.decisions import GuardedChosen, GuardedReason
from pageturner.service.core.request import QueueEntry, Request, RequestStatus
from pageturner.service.core.scheduling.state import SchedulerState


def choose_guarded(state: SchedulerState, guarded: Request | None) -> Request | None:
    """The guarded request of this step; `guarded` was that of the last one.

    It stays so until it ends (or cannot run), or until the planner lets it give way (`gives_way`). The next
    one is the request that waited longest past the bound, else the head of the running in the
    order of the queue policy, else the head of the queue.
    """

    is_eligible = partial(_is_eligible, state)
    if guarded is not None and guarded.status is not RequestStatus.FINISHED and is_eligible(guarded):
        return guarded
    bound = _starved_before(state)
    head = oldest = None
    for request in filter(is_eligible, state.waiting):
        head = head or request
        if request.queued_since < bound and (oldest is None or request.queued_since < oldest.queued_since):
            oldest = request
    running = filter(is_eligible, state.running.values())
    return oldest or min(running, key=_queue_entry, default=None) or head


def gives_way(state: SchedulerState, guarded: Request | None, claimant: Request) -> bool:
    """Whether the guarded request may lose the guarantee to a claimant that no other makes room for.

    To a strictly more urgent head of the queue it may, until it has waited, all in all, past the bound or
    been preempted as often as it may: then it is passed by no more, and ends.
    """
    if guarded is None or claimant.priority <= guarded.priority:
        return False
    if claimant is not next(filter(partial(_is_eligible, state), state.waiting), None):
        return False
    waited = guarded.queue_seconds
    if guarded.status is not RequestStatus.RUNNING:
        waited += state.now - guarded.queued_since
    options = state.options
    return waited <= options.starvation_seconds and guarded.num_preemptions < options.max_preemptions


def guard_note(state: SchedulerState, guarded: Request) -> GuardedChosen:
    """Why this one was chosen just now; asked before it is started."""
    if guarded.status is RequestStatus.RUNNING:
        reason = GuardedReason.HEAD_OF_RUNNING
    elif guarded.queued_since < _starved_before(state):
        reason = GuardedReason.STARVED
    else:
        reason = GuardedReason.HEAD_OF_QUEUE
    return GuardedChosen(guarded.request_id, reason)


def _is_eligible(state: SchedulerState, request: Request) -> bool:
    return not request.is_paused and state.may_run(request)


def _starved_before(state: SchedulerState) -> float:
    return state.now - state.options.starvation_seconds


def _queue_entry(request: Request) -> QueueEntry:
    assert request.queue_entry is not None, f"{request.request_id} runs and was never queued"
    return request.queue_entry
