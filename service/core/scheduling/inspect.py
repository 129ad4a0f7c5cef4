"""Looks at a scheduler between two steps, and changes nothing."""

from __future__ import annotations

from pageturner.service.core.inspection import RequestInfo, RequestState, SchedulerInspection
from pageturner.service.core.memory.block_manager import BlockManager
from pageturner.service.core.request import Request, RequestStatus
from pageturner.service.core.scheduling import views
from pageturner.service.core.scheduling.state import SchedulerState

_STATES = {
    RequestStatus.WAITING: RequestState.WAITING,
    RequestStatus.RUNNING: RequestState.RUNNING,
    RequestStatus.SWAPPED: RequestState.SWAPPED,
}


def inspect(state: SchedulerState, now: float) -> SchedulerInspection:
    """Its requests and block tables. now: on the clock of their arrivals."""
    live = [*state.running.values(), *state.waiting]
    num_running, manager = len(state.running), state.manager
    free, pending = manager.device.idle_blocks()
    return SchedulerInspection(
        requests=tuple(
            _describe(request, state, now, max(0, place + 1 - num_running))
            for place, request in enumerate(live)
        ),
        num_blocks=manager.device.num_blocks,
        free=free,
        pending=pending,
        tables=tuple(
            (place, manager.tables[sequence.seq_id])
            for place, request in enumerate(live)
            for sequence in request.sequences
            if sequence.seq_id in manager.tables
        ),
    )


def _describe(request: Request, state: SchedulerState, now: float, queue_position: int) -> RequestInfo:
    new, manager = request.new, state.manager
    is_waiting = queue_position > 0
    return RequestInfo(
        request_id=new.request_id,
        tenant=new.tenant,
        number=request.order,
        state=_STATES[request.status],
        queue_position=queue_position,
        priority=new.priority,
        num_choices=len(request.sequences),
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_prompt_tokens=request.num_cached_prompt_tokens,
        num_uncomputed_tokens=views.num_known_tokens(request) - views.num_computed_tokens(request),
        num_output_tokens=sum(sequence.num_output_tokens for sequence in request.sequences),
        max_tokens=request.max_tokens,
        num_blocks=_num_device_blocks(request, manager),
        num_host_blocks=_num_host_blocks(request, manager),
        num_preemptions=request.num_preemptions,
        age_seconds=now - new.arrival_time,
        queue_seconds=request.queue_seconds + (now - request.queued_since if is_waiting else 0.0),
        first_token_seconds=(
            None if request.first_token_at is None else request.first_token_at - new.arrival_time
        ),
        deadline_seconds=None if new.deadline is None else new.deadline - now,
        is_paused=request.is_paused,
        is_guarded=request is state.guarded,
    )


def _num_device_blocks(request: Request, manager: BlockManager) -> int:
    if len(request.sequences) == 1:  # almost all of them
        return manager.num_blocks(request.sequences[0])
    return len(manager.references(request))


def _num_host_blocks(request: Request, manager: BlockManager) -> int:
    if request.status is not RequestStatus.SWAPPED:
        return 0
    return len({block for sequence in request.sequences for block in manager.host_table(sequence)})
