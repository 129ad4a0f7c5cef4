"""Chooses the one request that no policy can hold back."""

from __future__ import annotations

from pageturner.service.core.decisions import ChampionChosen, ChampionReason
from pageturner.service.core.request import QueueEntry, Request, RequestStatus
from pageturner.service.core.scheduling.state import SchedulerState


def choose_guarded(state: SchedulerState, guarded: Request | None) -> Request | None:
    """It stays under the guard until it ends (or cannot run).

    The next one is whoever waited longest past the bound, else the head of the running in the order of
    the queue policy, else the head of the queue.
    """

    def is_eligible(request: Request) -> bool:
        return not request.is_paused and state.may_run(request)

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


def guard_note(state: SchedulerState, guarded: Request) -> ChampionChosen:
    """Why this one was chosen just now; asked before it is started."""
    if guarded.status is RequestStatus.RUNNING:
        reason = ChampionReason.HEAD_OF_RUNNING
    elif guarded.queued_since < _starved_before(state):
        reason = ChampionReason.STARVED
    else:
        reason = ChampionReason.HEAD_OF_QUEUE
    return ChampionChosen(guarded.request_id, reason)


def _starved_before(state: SchedulerState) -> float:
    return state.now - state.options.starvation_seconds


def _queue_entry(request: Request) -> QueueEntry:
    assert request.queue_entry is not None, f"{request.request_id} runs and was never queued"
    return request.queue_entry
