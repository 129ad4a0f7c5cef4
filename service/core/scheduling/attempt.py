"""One attempt to fill a step: walks requests in order and books each on a scratch ledger.

An attempt changes nothing. It ends with a plan, or with the first shortage for which others may yield;
the planner then decides who does and attempts again.
"""

from __future__ import annotations

from pageturner.policies.interfaces import Admission, Reclaim
from pageturner.policies.views import BatchView
from pageturner.service.core.decisions import CoreRule
from pageturner.service.core.memory.block_manager import BlockManager
from pageturner.service.core.memory.window import held
from pageturner.service.core.request import Request, RequestStatus, Sequence
from pageturner.service.core.scheduling.admission import AdmissionPlanner
from pageturner.service.core.scheduling.decode import Work, lacking_tokens
from pageturner.service.core.scheduling.ledger import Ledger
from pageturner.service.core.scheduling.state import SchedulerState
from pageturner.service.core.scheduling.step_budget import Place, StepBudget
from pageturner.service.core.scheduling.step_plan import Constraints, Preemption, Shortage, StepPlan
from pageturner.service.core.scheduling.tenant_shares import TenantShares, divides, step_shares, token_budget
from pageturner.service.core.scheduling.trace import Trace


class Attempt:
    """state: read only. guarded: planned first, refused by no policy.

    settled: decisions between attempts. budget: what is booked so far. num_booked: blocks booked for running
    requests, by Request.order.
    """

    def __init__(
        self, state: SchedulerState, guarded: Request | None, constraints: Constraints, settled: Trace
    ) -> None:
        self._state = state
        self._manager = state.manager
        self._guarded = guarded
        self._constraints = constraints
        self._running = [r for order, r in state.running.items() if order not in constraints.preemptions]
        slots = 0
        if state.waiting:  # running requests ask for no slots
            slots = state.options.max_num_seqs - sum(request.num_slots for request in self._running)
        self.budget = StepBudget(state, guarded, slots)
        self.num_booked: dict[int, int] = {}
        self._bypassed: list[Request] = []
        self._settled, self._trace = settled, Trace(state)
        self._shares = TenantShares(state, self._running) if divides(state) else None
        self._admission = AdmissionPlanner(
            state, self.budget, guarded, constraints, self._running, self._shares, self._trace
        )
        for preemption in constraints.preemptions.values():
            book_preemption(self.budget.ledger, state.manager, preemption, state.last_ended_step)

    def run(self) -> StepPlan | Shortage:
        """The whole step, or the first shortage for which others may yield."""
        work = lacking_tokens(self._running, self._guarded, self._state.suspects)
        self._split_budget(work)
        shortage = self._admit_guarded() or self._continue_all(work) or self._admit()
        if shortage is not None:
            return shortage
        return StepPlan(
            tuple(self._constraints.preemptions.values()),
            tuple(self.budget.admissions),
            tuple(self.budget.chunks),
            tuple(self._bypassed),
            self.budget.planned_producing,
            self._guarded,
            self._settled.decisions(self._trace, self._constraints.preemptions),
        )

    # --- running requests ------------------------------------------------------------------

    def _split_budget(self, work: Work) -> None:
        lacking = [remaining for _, remaining in work]
        prefills = tuple(remaining for remaining in lacking if remaining > 1)
        num_decodes = lacking.count(1)
        num_tokens = self.budget.total_left = token_budget(self._state, num_decodes)
        batch = BatchView(num_tokens, num_decodes, prefills, len(self._state.waiting))
        split = self._state.policy_host.batch_split(batch)
        self.budget.split_budget(split)
        is_divided = divides(self._state) and self._divide(work)
        if is_divided:
            work.sort(key=lambda item: (item[0].request is not self._guarded, item[0].last_step))
        elif 0 < split.decode_tokens < batch.num_decode_tokens:
            # Not every sequence gets a token in this step: turns are taken, by the guarded request too.
            work.sort(key=lambda item: item[0].last_step)

    def _divide(self, work: Work) -> bool:
        """Bound what each tenant computes in this step; whether any is bounded."""
        first: dict[str, Request] = {}
        for request in self._state.waiting:
            first.setdefault(request.new.tenant, request)
            if len(first) == len(self._state.num_live):
                break
        shares = step_shares(self._state, work, filter(self._may_start, first.values()))
        self.budget.divide(shares)
        return shares is not None

    def _may_start(self, request: Request) -> bool:
        constraints = self._constraints
        if request.is_paused or request.order in constraints.blocked or not self._state.may_run(request):
            return False
        if request.order in constraints.preemptions:
            return False
        return request.num_slots <= self.budget.ledger.slots or self._admission.may_claim(request)

    def _continue_all(self, work: Work) -> Shortage | None:
        budget = self.budget
        for sequence, remaining in work:
            if remaining == 1 and budget.book_in_place(sequence):
                continue
            shortage = self._continue(sequence)
            if shortage is not None:
                return shortage
        return None

    def _continue(self, sequence: Sequence) -> Shortage | None:
        request, ledger = sequence.request, self.budget.ledger
        before = ledger.available
        place = Place(self._manager.table(sequence), sequence.num_computed_tokens, sequence.num_kv_tokens)
        missing = self.budget.book_chunk(sequence, place)
        self.num_booked[request.order] = self.num_booked.get(request.order, 0) + before - ledger.available
        if missing and request.order not in self._constraints.stalled:
            return Shortage(request, missing)
        return None

    # --- waiting requests ------------------------------------------------------------------

    def _admit_guarded(self) -> Shortage | None:
        guarded = self._guarded
        if guarded is None or guarded.status is RequestStatus.RUNNING:
            return None
        if guarded.order in self._constraints.blocked:
            return None
        return self._admission.try_admit(guarded)[1]

    def _admit(self) -> Shortage | None:
        """PlannedAdmission waiting requests in order, looking past a bounded number that do not fit.

        A request that was overtaken often enough is overtaken no more: admissions hold until it starts. Where
        they hold, it is for the tenants that have their share: one that has less is not held up by another.
        """
        state, constraints = self._state, self._constraints
        passed: list[Request] = []
        patience = state.options.max_bypasses
        held: set[str] | None = None  # once admissions hold: the tenants that they hold for
        for request in state.waiting:
            if held is None and (not self.budget.has_budget or patience <= 0):
                guard = CoreRule.MAX_BYPASSES if self.budget.has_budget else CoreRule.BUDGET
                self._trace.held(guard, passed)
                held = set()
            if held is not None:
                if self._shares is None or len(held) == len(state.num_live) or not self.budget.has_budget:
                    break
                tenant = request.new.tenant
                if tenant in held or not self._shares.is_owed(request):
                    held.add(tenant)
                    continue
            if (
                request is self._guarded
                or request.is_paused
                or request.order in constraints.preemptions
                or not state.may_run(request)
            ):
                continue
            if constraints.preemptions and request.order not in constraints.claimants:
                continue
            answer = Admission.SKIP
            if request.order not in constraints.blocked:
                answer, shortage = self._admission.try_admit(request)
                if shortage is not None:
                    return shortage
            if held is not None:
                if answer is not Admission.ADMIT:
                    held.add(request.new.tenant)
                continue
            if answer is Admission.ADMIT:
                self._bypassed.extend(passed)
                self._trace.overtaken(passed, request)
                patience -= bool(passed)
                continue
            passed.append(request)
            patience = min(patience, state.options.max_bypasses - request.num_bypasses)
            if answer is Admission.WAIT or len(passed) > state.options.max_skips:
                rule = self._admission.held_by if answer is Admission.WAIT else CoreRule.MAX_SKIPS
                self._trace.held(rule, passed)
                held = {request.new.tenant}
        return None


def book_preemption(
    ledger: Ledger, manager: BlockManager, preemption: Preemption, last_ended_step: int
) -> None:
    """Book what a preempted request gives back."""
    request = preemption.request
    in_flight = request.last_step > last_ended_step
    if preemption.how is Reclaim.TAIL:
        for sequence, num_kept in preemption.cuts:
            ledger.drop(reversed(held(manager.table(sequence), num_kept)), in_flight=in_flight)
        return
    if preemption.how is Reclaim.SWAP:
        ledger.host_available -= len(manager.references(request))
    for sequence in request.sequences:
        ledger.drop(reversed(held(manager.table(sequence))), in_flight=in_flight)
