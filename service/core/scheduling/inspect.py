"""Looks at a scheduler between two steps, and changes nothing."""

from __future__ import annotations

from itertools import islice

from pageturner.service.core.inspection import UNTOLD, RequestInfo, RequestState, SchedulerInspection
from pageturner.service.core.memory.window import held
from pageturner.service.core.request import Request, RequestStatus
from pageturner.service.core.scheduling import views
from pageturner.service.core.scheduling.state import SchedulerState

MAX_TOLD = 1000
"""Requests, all that run and the first that wait: a look between two steps takes a few ms at most."""

_STATES = {
    RequestStatus.WAITING: RequestState.WAITING,
    RequestStatus.RUNNING: RequestState.RUNNING,
    RequestStatus.SWAPPED: RequestState.SWAPPED,
}


def inspect(state: SchedulerState, now: float) -> SchedulerInspection:
    """Its requests and block tables. now: on the clock of their arrivals."""
    num_running, manager = len(state.running), state.manager
    live = list(state.running.values())
    live += islice(state.waiting, max(0, MAX_TOLD - num_running))
    # Those that wait far behind and hold blocks all the same, as a reclaimed tail leaves them.
    told = {request.order for request in live}
    untold = [request for order, request in state.holders.items() if order not in told]
    free, pending = manager.device.idle_blocks()
    return SchedulerInspection(
        requests=tuple(
            _describe(request, state, now, max(0, place + 1 - num_running))
            for place, request in enumerate(live)
        ),
        num_requests=num_running + len(state.waiting),
        num_blocks=manager.device.num_blocks,
        free=free,
        pending=pending,
        tables=tuple(
            (place, held(manager.tables[sequence.seq_id]))
            for place, request in [*enumerate(live), *((UNTOLD, request) for request in untold)]
            for sequence in request.sequences
            if sequence.seq_id in manager.tables
        ),
        cached=manager.cached_hashes(),
    )


def _describe(request: Request, state: SchedulerState, now: float, queue_position: int) -> RequestInfo:
    """By place, not by name: a queue of thousands is told between two steps."""
    new, sequences, prompt = request.new, request.sequences, request.num_prompt_tokens
    num_host_blocks = 0
    if len(sequences) == 1:  # almost all of them
        sequence = sequences[0]
        known = len(sequence.tokens)
        outputs, num_blocks = known - prompt, state.manager.num_blocks(sequence)
        computed = 0 if request.status is RequestStatus.SWAPPED else min(known, sequence.num_kv_tokens)
    else:
        known, computed = views.num_known_tokens(request), views.num_computed_tokens(request)
        outputs = sum(sequence.num_output_tokens for sequence in sequences)
        num_blocks = len(state.manager.references(request))
    if request.status is RequestStatus.SWAPPED:
        tables = map(state.manager.host_table, sequences)
        num_host_blocks = len({block for table in tables for block in held(table)})
    arrival_time, first_token_at = new.arrival_time, request.first_token_at
    waiting_seconds = now - request.queued_since if queue_position else 0.0
    return RequestInfo(
        new.request_id,
        new.tenant,
        request.order,
        _STATES[request.status],
        queue_position,
        new.priority,
        len(sequences),
        prompt,
        request.num_cached_prompt_tokens,
        known - computed,
        outputs,
        request.max_tokens,
        num_blocks,
        num_host_blocks,
        request.num_preemptions,
        now - arrival_time,
        request.queue_seconds + waiting_seconds,
        None if first_token_at is None else first_token_at - arrival_time,
        None if new.deadline is None else new.deadline - now,
        request.is_paused,
        request is state.guarded,
    )
