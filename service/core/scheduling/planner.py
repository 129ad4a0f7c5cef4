"""Decides one step: attempt to fill it, have others yield where it falls short, attempt again.

Each round either ends or settles one more request (as yielding, stalled or blocked), so planning ends.
Afterwards every victim that turns out not to be needed is spared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from pageturner.policies.interfaces import Reclaim
from pageturner.service.core.decisions import CoreRule
from pageturner.service.core.request import Request, RequestStatus
from pageturner.service.core.scheduling import views
from pageturner.service.core.scheduling.attempt import Attempt, book_preemption
from pageturner.service.core.scheduling.ledger import Ledger
from pageturner.service.core.scheduling.starvation_guard import gives_way
from pageturner.service.core.scheduling.state import SchedulerState
from pageturner.service.core.scheduling.step_plan import Constraints, Preemption, Shortage, StepPlan
from pageturner.service.core.scheduling.tenant_shares import TenantShares, divides
from pageturner.service.core.scheduling.trace import Trace


class Planner:
    """state: read only; every decision comes back as a `StepPlan`."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def plan(self, guarded: Request | None) -> StepPlan:
        """Decide the step; nothing is changed. guarded: the request that no policy can hold back.

        The plan names another one where it gives way (`starvation_guard.gives_way`).
        """
        constraints, trace = Constraints(), Trace(self._state)
        while True:
            attempt = Attempt(self._state, guarded, constraints, trace)
            outcome = attempt.run()
            if isinstance(outcome, StepPlan):
                if constraints.await_pending:
                    return outcome  # the victims' blocks are needed, but not in this step
                return self._spare_needless(outcome, guarded, constraints, trace)
            if not self._resolve(outcome, attempt, guarded, constraints, trace):
                guarded, constraints, trace = outcome.claimant, Constraints(), Trace(self._state)

    # --- who yields ------------------------------------------------------------------------

    def _resolve(
        self,
        shortage: Shortage,
        attempt: Attempt,
        guarded: Request | None,
        constraints: Constraints,
        trace: Trace,
    ) -> bool:
        """Settle one more request, so that the next attempt gets further.

        False if that takes the guarantee: the claimant, whom the others can't help, is the guarded request.
        """
        claimant = shortage.claimant
        is_running = claimant.status is RequestStatus.RUNNING
        chosen: list[Request] | None = None
        covered_by_pending = (
            shortage.num_slots == 0 and 0 < shortage.num_blocks <= attempt.budget.ledger.pending
        )
        # Blocks that fall free when the step in flight ends cover a need too: waiting for them is
        # cheaper than another victim, and without it a shortage would cascade through all of them.
        if covered_by_pending:
            constraints.await_pending = True
        else:
            holders = self._holders(claimant, guarded, constraints)
            candidates = self._candidates(claimant, guarded, constraints)
            order = holders + self._ranked(candidates, claimant)
            chosen = self._minimal_victims(order, shortage, attempt, constraints)
        if chosen is None:
            if not covered_by_pending and gives_way(self._state, guarded, claimant):
                return False
            (constraints.stalled if is_running else constraints.blocked).add(claimant.order)
            num_available = attempt.budget.ledger.available
            trace.left_out(shortage, num_available, awaits_pending=covered_by_pending)
            return True
        if not is_running:
            constraints.claimants.add(claimant.order)
        for victim in chosen:
            preemption = self._how(victim, shortage, constraints)
            constraints.preemptions[victim.order] = preemption
            trace.preempted(preemption, shortage, order)
        return True

    def _holders(self, claimant: Request, guarded: Request | None, constraints: Constraints) -> list[Request]:
        """Waiting requests that still hold blocks: they yield before anyone who runs, by the same ranks."""
        is_running = claimant.status is RequestStatus.RUNNING
        return [
            request
            for request in self._state.holders.values()
            if request not in (claimant, guarded)
            and request.order not in constraints.preemptions
            and request.order not in constraints.claimants
            and (
                claimant is guarded
                or request.priority < claimant.priority
                or (is_running and request.priority == claimant.priority)
            )
        ]

    def _candidates(
        self, claimant: Request, guarded: Request | None, constraints: Constraints
    ) -> list[Request]:
        """Running requests that may yield to the claimant; one that yields its tail may yield whole.

        No request yields to a less urgent one; a waiting claimant needs a strictly lower priority, or a
        tenant that has more than its share; who has been preempted often enough yields to the guarded request
        alone, which none of this binds.
        """
        running = [
            request
            for order, request in self._state.running.items()
            if order not in constraints.preemptions or constraints.preemptions[order].how is Reclaim.TAIL
        ]
        if claimant is guarded:
            return [request for request in running if request is not guarded]
        is_running = claimant.status is RequestStatus.RUNNING
        limit = self._state.options.max_preemptions
        shares = None
        if not is_running and divides(self._state):
            shares = TenantShares(self._state, running)
            for request in self._state.waiting if constraints.claimants else ():
                if request.order in constraints.claimants and request is not claimant:
                    shares.add(request)
            shares = shares if shares.may_claim(claimant) else None
        return [
            request
            for request in running
            if request is not guarded
            and request.num_preemptions < limit
            and (
                request.priority < claimant.priority
                or (is_running and request.priority == claimant.priority)
                or (shares is not None and shares.yields(request, claimant))
            )
        ]

    def _ranked(self, candidates: list[Request], claimant: Request) -> list[Request]:
        """The policy's order; requests paused for a slow reader come first, protected ones last."""
        if not candidates:
            return []
        manager = self._state.manager
        by_id = {request.request_id: request for request in candidates}
        order = self._state.policy_host.victim_order(
            [views.victim_view(request, manager) for request in candidates],
            views.request_view(claimant),
            self._state.load(),
        )
        limit = self._state.options.max_preemptions
        ranked = [by_id[request_id] for request_id in order]
        return sorted(ranked, key=lambda r: (not r.is_paused, r.num_preemptions >= limit))

    def _minimal_victims(
        self, order: list[Request], shortage: Shortage, attempt: Attempt, constraints: Constraints
    ) -> list[Request] | None:
        """The shortest head of `order` that covers the shortage, less everyone not needed; None if all
        together do not. A claimant that comes up first yields alone."""
        claimant = shortage.claimant
        chosen: list[Request] = []
        for request in order:
            if request is claimant:
                return [claimant]
            chosen.append(request)
            if self._covers(chosen, shortage, attempt, constraints):
                break
        else:
            return None
        for request in chosen[:-1]:
            fewer = [other for other in chosen if other is not request]
            if self._covers(fewer, shortage, attempt, constraints):
                chosen = fewer
        return chosen

    def _covers(
        self,
        victims: Collection[Request],
        shortage: Shortage,
        attempt: Attempt,
        constraints: Constraints,
    ) -> bool:
        """Whether these victims, as well as those settled before, free enough blocks and slots.

        Blocks are counted on a ledger: one that another table still names frees nothing. What the
        attempt had booked for a victim comes back as well.
        """
        more = {victim.order: Preemption(victim, Reclaim.RECOMPUTE) for victim in victims}
        freed = self._freed_by(constraints.preemptions | more) - self._freed_by(constraints.preemptions)
        slots = 0
        for victim in victims:
            if victim.order not in constraints.preemptions:
                freed += attempt.num_booked.get(victim.order, 0)
                slots += victim.num_slots if victim.status is RequestStatus.RUNNING else 0
        return freed >= shortage.num_blocks and slots >= shortage.num_slots

    def _freed_by(self, yields: Mapping[int, Preemption]) -> int:
        """Device blocks, pending ones included, that fall free if all of these yield."""
        ledger = Ledger(self._state.manager, 0)
        before = ledger.available + ledger.pending
        for preemption in yields.values():
            book_preemption(ledger, self._state.manager, preemption, self._state.last_ended_step)
        return ledger.available + ledger.pending - before

    # --- how they yield --------------------------------------------------------------------

    def _how(self, victim: Request, shortage: Shortage, constraints: Constraints) -> Preemption:
        """Ask the reclaim policy; an impossible answer is replaced by the default's, then by recompute."""
        if victim.status is not RequestStatus.RUNNING or victim.order in constraints.preemptions:
            # A holder, or one whose tail is not enough, yields whole.
            return Preemption(victim, Reclaim.RECOMPUTE, by=CoreRule.WHOLE.value)
        state = self._state
        view = views.victim_view(victim, state.manager)
        if view.num_blocks == 0:
            return Preemption(victim, Reclaim.RECOMPUTE, by=CoreRule.WHOLE.value)
        room = state.manager.host.num_available - sum(
            len(state.manager.references(preemption.request))
            for preemption in constraints.preemptions.values()
            if preemption.how is Reclaim.SWAP
        )
        num_short = max(1, shortage.num_blocks)
        load = state.load()
        load = replace(load, host=replace(load.host, num_free=max(0, room), num_evictable=0))
        asked = (
            (state.policy_host.names["reclaim"], state.policy_host.reclaim),
            (CoreRule.DEFAULT.value, state.policy_host.default_reclaim),
        )
        for by, ask in asked:
            how = ask(view, num_short, state.rates, load)
            if how is Reclaim.RECOMPUTE or (how is Reclaim.SWAP and view.num_blocks <= room):
                return Preemption(victim, how, by=by)
            if victim is shortage.claimant and how is Reclaim.TAIL:
                continue  # its own tail would not help it; the policy could not know whose victim it is
            if how is Reclaim.TAIL and view.num_tail_blocks >= num_short:
                return Preemption(victim, how, tuple(state.manager.tail_cuts(victim, num_short)), by)
            state.policy_host.fault("reclaim", f"chose {how.value} for {view.request.request_id}: no room")
        return Preemption(victim, Reclaim.RECOMPUTE, by=CoreRule.CAPACITY.value)

    # --- sparing ---------------------------------------------------------------------------

    def _spare_needless(
        self, plan: StepPlan, guarded: Request | None, constraints: Constraints, trace: Trace
    ) -> StepPlan:
        """Drop each victim without whom the same plan stands: a later one may have freed enough.

        A claimant left out after all would have cost its victims for nothing; sparing them mends that too.
        """
        for order in list(constraints.preemptions):
            fewer = replace(
                constraints, preemptions={o: y for o, y in constraints.preemptions.items() if o != order}
            )
            outcome = Attempt(self._state, guarded, fewer, trace).run()
            if isinstance(outcome, StepPlan) and self._serves_all(plan, outcome):
                constraints, plan = fewer, outcome
        return plan

    @staticmethod
    def _serves_all(plan: StepPlan, other: StepPlan) -> bool:
        """Whether `other` schedules at least the sequences and tokens that `plan` does."""
        tokens = {chunk.sequence.seq_id: chunk.num_tokens for chunk in other.chunks}
        return all(tokens.get(chunk.sequence.seq_id, 0) >= chunk.num_tokens for chunk in plan.chunks)
