"""The ordinary step: everything that lives runs, and each sequence decodes its next token.

Nothing waits, so nothing is admitted; no block runs short, so nothing is preempted. Only the batch policy is
asked. `plan_decodes` gives the plan that `Planner` would, without a ledger; any other step is the planner's.
"""

from __future__ import annotations

from collections.abc import Collection

from pageturner.policies.views import BatchView
from pageturner.service.core.memory.block_manager import BlockManager
from pageturner.service.core.request import Request, RequestStatus, Sequence
from pageturner.service.core.scheduling.state import SchedulerState
from pageturner.service.core.scheduling.step_plan import StepPlan
from pageturner.service.core.scheduling.tenant_shares import step_shares, token_budget

Work = list[tuple[Sequence, int]]
"""Running sequences and the tokens that each lacks."""


def plan_decodes(state: SchedulerState, guarded: Request | None) -> StepPlan | None:
    """The whole step, if it is an ordinary one; None leaves it to the planner, and nothing is changed.

    It runs through every sequence in every step, so it asks `has_slot_of_its_own` and its like in place.
    """
    if len(state.running) < len(state.requests) or state.suspects is not None or state.num_scoring:
        return None
    if guarded is None or guarded.is_paused or guarded.status is not RequestStatus.RUNNING:
        return None  # another guarded request is to be chosen
    manager = state.manager
    tables, block_size, is_private = manager.tables, manager.block_size, manager.device.is_private
    decodes: list[Sequence] = []
    num_new = 0
    for request in state.running.values():
        if request.is_paused:
            continue
        if not request.is_forked:
            return None
        max_tokens, needs_history = request.max_total_tokens, request.needs_history
        for sequence in request.computing if len(request.sequences) > 1 else request.sequences:
            num_in_flight, position = sequence.num_in_flight, sequence.num_computed_tokens
            num_tokens = len(sequence.tokens) + num_in_flight
            if num_tokens == position or num_tokens >= max_tokens or (num_in_flight and needs_history):
                continue  # it lacks nothing
            if num_tokens > position + 1 or position != sequence.num_kv_tokens:
                return None
            table, index = tables[sequence.seq_id], position // block_size
            if index == len(table):
                num_new += 1
            elif not is_private(table[index]):
                return None
            decodes.append(sequence)
    budget = state.options.max_num_batched_tokens
    if len(decodes) > budget or (num_new and num_new > manager.device.num_available):
        return None
    if decodes and decodes[0].request is not guarded:
        decodes.sort(key=lambda sequence: sequence.request is not guarded)
    is_divided = state.options.share_between_tenants and len(state.num_live) > 1
    if is_divided and step_shares(state, [(sequence, 1) for sequence in decodes], ()) is not None:
        return None
    num_tokens = token_budget(state, len(decodes)) if state.options.share_between_tenants else budget
    split = state.policy_host.batch_split(BatchView(num_tokens, len(decodes), (), 0))
    if split.decode_tokens < len(decodes):
        return None
    return StepPlan((), (), (), (), {}, guarded, decodes=tuple(decodes))


def lacking_tokens(
    running: Collection[Request], guarded: Request | None, suspects: frozenset[int] | None
) -> Work:
    """The sequences that may compute and the tokens each lacks, those of the guarded request first.

    suspects: while a failed step is being searched, the requests that may run.
    """
    work = [
        (sequence, sequence.num_remaining)
        for request in running
        if not request.is_paused and (suspects is None or request.order in suspects)
        for sequence in request.computing
    ]
    if work and work[0][0].request is not guarded:
        work.sort(key=lambda item: item[0].request is not guarded)
    return work


def has_slot_of_its_own(manager: BlockManager, sequence: Sequence) -> bool:
    """Whether the next token's slot is there, in a block that is not cached and that no other table names.

    Such a block can neither be claimed nor given up by any other in this step, so no ledger is asked.
    """
    position, table = sequence.num_kv_tokens, manager.tables.get(sequence.seq_id, ())
    if position != sequence.num_computed_tokens or position >= len(table) * manager.block_size:
        return False
    return manager.device.is_private(table[position // manager.block_size])
