"""Notes the planner's decisions for listeners, so that the planner reads as planning.

Without a listener nothing is noted. Notes of an attempt are thrown away with it; what was settled between
attempts is kept in the trace of the step's constraints.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pageturner.service.core.decisions import (
    AdmissionsHeld,
    Admitted,
    CoreRule,
    Decision,
    Overtaken,
    Preempted,
    Refused,
    Stalled,
)
from pageturner.service.core.request import Request, RequestStatus
from pageturner.service.core.scheduling.state import SchedulerState
from pageturner.service.core.scheduling.step_plan import PlannedAdmission, Preemption, Shortage


class Trace:
    """state: whose listeners are asked for; read only."""

    def __init__(self, state: SchedulerState) -> None:
        self._is_on = state.decisions is not None
        self._host = state.policy_host
        self._block_size = state.manager.block_size
        self._notes: list[Decision] = []
        self._preemptions: dict[int, Preempted] = {}

    def note(self, decision: Decision) -> None:
        """Note one decision as it is."""
        if self._is_on:
            self._notes.append(decision)

    def lacks_slots(self, request: Request, num_slots_short: int) -> None:
        """A waiting request finds no slots, whatever policies say."""
        if self._is_on:
            by = CoreRule.CAPACITY.value
            self._notes.append(Refused(request.request_id, by, 0, 0, num_slots_short=num_slots_short))

    def admitted(self, start: PlannedAdmission, guard: CoreRule | None) -> None:
        """A waiting request starts. guard: by what, if no policy was asked."""
        if not self._is_on:
            return
        request = start.request
        self._notes.append(
            Admitted(
                request.request_id,
                self._host.names["admission"] if guard is None else guard.value,
                request.admitted_at is None,
                request.status is RequestStatus.SWAPPED,
                start.num_hit_tokens(self._block_size),
            )
        )

    def overtaken(self, passed: Sequence[Request], by: Request) -> None:
        """`by` was admitted before those that come first in the queue."""
        if self._is_on:
            self._notes += [Overtaken(other.request_id, by.request_id) for other in passed]

    def held(self, guard: CoreRule | None, passed: Sequence[Request]) -> None:
        """The rest of the queue is not looked at: the admission policy says so, or a guard."""
        if self._is_on:
            names = self._host.names
            by = names["admission"] if guard is None else guard.value
            after = passed[-1].request_id if passed else ""
            self._notes.append(AdmissionsHeld(by, after, names["queue"], names["batch"]))

    def left_out(self, shortage: Shortage, num_available: int, *, awaits_pending: bool) -> None:
        """No other yields to the claimant in this step. num_available: blocks left to it, in need of more."""
        if not self._is_on:
            return
        claimant, num_blocks = shortage.claimant, shortage.num_blocks
        if claimant.status is RequestStatus.RUNNING:
            self._notes.append(Stalled(claimant.request_id, num_blocks, awaits_pending))
            return
        num_available = max(0, num_available)
        num_needed = num_blocks + num_available if num_blocks else 0
        by = CoreRule.PENDING if awaits_pending else CoreRule.CAPACITY
        self._notes.append(
            Refused(
                claimant.request_id,
                by.value,
                num_needed,
                num_available,
                num_slots_short=shortage.num_slots,
            )
        )

    def preempted(self, preemption: Preemption, shortage: Shortage, order: list[Request]) -> None:
        """A victim of `order` yields to the claimant; a later note of the same one takes this one's place."""
        if not self._is_on:
            return
        victim = preemption.request
        by = self._host.names["victim"]
        if victim.status is not RequestStatus.RUNNING:
            by = CoreRule.HOLDERS_FIRST.value
        elif victim.is_paused:
            by = CoreRule.PAUSED_FIRST.value
        self._preemptions[victim.order] = Preempted(
            victim.request_id,
            shortage.claimant.request_id,
            by,
            order.index(victim) + 1,
            len(order),
            preemption.how,
            preemption.by,
            shortage.num_blocks,
            shortage.num_slots,
        )

    def decisions(self, attempt: Trace, kept: Collection[int]) -> tuple[Decision, ...]:
        """What was settled, and what the attempt that stands decided. kept: victims that do yield."""
        preemptions = (note for order, note in self._preemptions.items() if order in kept)
        return (*self._notes, *preemptions, *attempt._notes)
