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
from pageturner.service.core.scheduling.step_plan import Chunk, StepPlan

Work = list[tuple[Sequence, int]]
"""Running sequences and the tokens that each lacks."""


def plan_decodes(state: SchedulerState, guarded: Request | None) -> StepPlan | None:
    """The whole step, if it is an ordinary one; None leaves it to the planner, and nothing is changed."""
    if len(state.running) < len(state.requests) or state.suspects is not None:
        return None
    if guarded is None or guarded.is_paused or guarded.status is not RequestStatus.RUNNING:
        return None  # another guarded request is to be chosen
    work = [item for item in lacking_tokens(state.running.values(), guarded, None) if item[1]]
    budget = state.options.max_num_batched_tokens
    if len(work) > budget or any(remaining > 1 for _, remaining in work):
        return None
    chunks, num_new = [], 0
    for sequence, _ in work:
        is_in_place = has_slot_of_its_own(state.manager, sequence)
        if not is_in_place:
            if not needs_new_block(state.manager, sequence):
                return None
            num_new += 1
        chunks.append(Chunk(sequence, 1, is_last=True, is_in_place=is_in_place))
    if num_new and num_new > state.manager.device.num_available:
        return None
    split = state.policy_host.batch_split(BatchView(budget, len(work), (), 0))
    if split.decode_tokens < len(work):
        return None
    return StepPlan((), (), tuple(chunks), (), {}, guarded)


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


def needs_new_block(manager: BlockManager, sequence: Sequence) -> bool:
    """Whether the next token's slot is the first of a block that the sequence does not have yet."""
    table = manager.tables.get(sequence.seq_id, ())
    return sequence.num_kv_tokens == sequence.num_computed_tokens == len(table) * manager.block_size
