"""A scheduler between two steps, as frozen values: all but its requests, which are named by their order."""

from __future__ import annotations

from dataclasses import dataclass

from pageturner.service.core.memory.block_pool import PoolState
from pageturner.service.policy_host.snapshot import PolicyHostState


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """running, holders, waiting, guarded: by `Request.order`. Totals that only feed statistics are not kept.

    producing: (hash of a block that the last step was to make, its maker). suspect_groups: as `Suspects`
    says. next_resort: when the order of the queue is looked at again.
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
