"""A scheduler between two steps, as frozen values: all but its requests, which are named by their order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pageturner.service.core.memory.block import PoolState
from pageturner.service.core.memory.tiers import TierState
from pageturner.service.core.request import Request, RequestStatus
from pageturner.service.core.scheduling.fetching import Fetching, FetchState
from pageturner.service.core.scheduling.pace import PaceState
from pageturner.service.core.scheduling.state import SchedulerState
from pageturner.service.core.scheduling.suspects import Suspects
from pageturner.service.core.scheduling.waiting_queue import QueueOrder
from pageturner.service.policy_host.snapshot import PolicyHostState


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """running, holders, waiting, guarded: by `Request.order`. Totals that only feed statistics are not kept.

    producing: (hash of a block that the last step was to make, its maker). suspect_groups: as `Suspects`
    says. next_resort: when the order of the queue is looked at again. pace: None in records of versions that
    did not measure it. tiers, fetches: None without the host tier, and without the disk.
    """

    now: float
    running: tuple[int, ...]
    holders: tuple[int, ...]
    waiting: tuple[int, ...]
    producing: tuple[tuple[bytes, int], ...]
    suspect_groups: tuple[tuple[int, ...], ...]
    guarded: int | None
    pending_clears: tuple[int, ...]
    last_ended_step: int
    next_order: int
    next_seq_id: int
    next_step_id: int
    next_resort: float
    device: PoolState
    host: PoolState
    policies: PolicyHostState
    pace: PaceState | None = None
    is_full: bool = False
    is_sweep_due: bool = False
    tiers: TierState | None = None
    fetches: FetchState | None = None


def take_snapshot(
    state: SchedulerState, suspects: Suspects, queue_order: QueueOrder, fetching: Fetching | None
) -> SchedulerSnapshot | None:
    """All but the requests; None while a step is in flight."""
    if state.unfinished_steps:
        return None
    guarded = state.guarded
    is_live = guarded is not None and guarded.status is not RequestStatus.FINISHED
    return SchedulerSnapshot(
        now=state.now,
        running=tuple(state.running),
        holders=tuple(state.holders),
        waiting=tuple(request.order for request in state.waiting),
        producing=tuple(
            (block_hash, maker.order)
            for block_hash, maker in state.producing.items()
            if maker.status is not RequestStatus.FINISHED
        ),
        suspect_groups=suspects.snapshot(),
        guarded=guarded.order if guarded is not None and is_live else None,
        pending_clears=tuple(state.pending_clears),
        last_ended_step=state.last_ended_step,
        next_order=state.next_order,
        next_seq_id=state.next_seq_id,
        next_step_id=state.next_step_id,
        next_resort=queue_order.next_resort,
        device=state.manager.device.snapshot(),
        host=state.manager.host.snapshot(),
        policies=state.policy_host.snapshot(),
        pace=state.pace.snapshot(),
        is_full=state.is_full,
        is_sweep_due=state.is_sweep_due,
        tiers=None if state.manager.tiers is None else state.manager.tiers.snapshot(),
        fetches=None if fetching is None else fetching.snapshot(),
    )


def restore_snapshot(
    snapshot: SchedulerSnapshot,
    requests: Iterable[Request],
    state: SchedulerState,
    suspects: Suspects,
    queue_order: QueueOrder,
    fetching: Fetching | None,
) -> None:
    """Bring the parts of a scheduler just made to `snapshot`. requests: as `Scheduler.restore` says."""
    by_order = {request.order: request for request in requests}
    for request in by_order.values():
        state.enlist(request)
        for sequence in request.unfinished:
            state.sequences[sequence.seq_id] = sequence
    state.now = snapshot.now
    state.running.update((order, by_order[order]) for order in snapshot.running)
    state.holders.update((order, by_order[order]) for order in snapshot.holders)
    state.waiting.restore(by_order[order] for order in snapshot.waiting)
    state.producing = {block_hash: by_order[order] for block_hash, order in snapshot.producing}
    state.pending_clears = list(snapshot.pending_clears)
    state.last_ended_step = snapshot.last_ended_step
    suspects.restore(snapshot.suspect_groups)
    state.guarded = None if snapshot.guarded is None else by_order[snapshot.guarded]
    state.next_order = snapshot.next_order
    state.next_seq_id = snapshot.next_seq_id
    state.next_step_id = snapshot.next_step_id
    queue_order.next_resort = snapshot.next_resort
    state.manager.device.restore(snapshot.device)
    state.manager.host.restore(snapshot.host)
    if state.manager.tiers is not None and snapshot.tiers is not None:
        state.manager.tiers.restore_state(snapshot.tiers)
    if fetching is not None and snapshot.fetches is not None:
        fetching.restore(snapshot.fetches, by_order)
    state.policy_host.restore(snapshot.policies)
    state.is_full, state.is_sweep_due = snapshot.is_full, snapshot.is_sweep_due
    if snapshot.pace is not None:
        state.pace.restore(snapshot.pace)
