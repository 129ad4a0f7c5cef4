"""Books the admission of a waiting request: what it can share, whether it may, and its first chunk."""

from __future__ import annotations

from dataclasses import replace

from pageturner.policies.interfaces import Admission
from pageturner.service.core.decisions import AwaitsProducer, CoreRule, Decision, Refused
from pageturner.service.core.memory.block_manager import blocks_for
from pageturner.service.core.memory.window import held
from pageturner.service.core.outputs import NO_BLOCK
from pageturner.service.core.request import Request, RequestStatus
from pageturner.service.core.scheduling import views
from pageturner.service.core.scheduling.deadline_gate import DeadlineGate
from pageturner.service.core.scheduling.ledger import virtual
from pageturner.service.core.scheduling.restoring import Restoring, may_use_tiers
from pageturner.service.core.scheduling.starvation_guard import gives_way
from pageturner.service.core.scheduling.state import SchedulerState
from pageturner.service.core.scheduling.step_budget import Place, StepBudget
from pageturner.service.core.scheduling.step_plan import Constraints, PlannedAdmission, Shortage
from pageturner.service.core.scheduling.tenant_shares import TenantShares
from pageturner.service.core.scheduling.trace import Trace


class _CannotStart(Exception):
    """A start that does not fit or may not happen.

    note: the decision, as listeners are told. num_blocks, num_slots: what is missing. may_claim: whether
    others yielding would help. answer: what it means for those behind.
    """

    def __init__(
        self,
        note: Decision,
        num_blocks: int = 0,
        num_slots: int = 0,
        *,
        may_claim: bool = True,
        answer: Admission = Admission.SKIP,
    ) -> None:
        super().__init__()
        self.note = note
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.may_claim = may_claim
        self.answer = answer


def _lacks(request: Request, num_needed: int = 0, num_available: int = 0, num_slots: int = 0) -> Refused:
    """Blocks or slots are short, whatever policies say."""
    return Refused(
        request.request_id, CoreRule.CAPACITY.value, num_needed, num_available, num_slots_short=num_slots
    )


class AdmissionPlanner:
    """running: requests that run in this attempt, those that yield left out. shares: what tenants hold of the
    slots and blocks, where they share. held_by: the rule that has admissions wait, where it is no policy."""

    def __init__(
        self,
        state: SchedulerState,
        budget: StepBudget,
        guarded: Request | None,
        constraints: Constraints,
        running: list[Request],
        shares: TenantShares | None,
        trace: Trace,
    ) -> None:
        self._state = state
        self._manager = state.manager
        self._block_size = state.manager.block_size
        self._budget = budget
        self._ledger = budget.ledger
        self._guarded = guarded
        self._constraints = constraints
        self._running = running
        self._shares = shares
        self._trace = trace
        self._restoring = None if state.manager.tiers is None else Restoring(state, budget)
        self._least_priority: float | None = None
        self._gate: DeadlineGate | None = None
        self.held_by: CoreRule | None = None

    def try_admit(self, request: Request) -> tuple[Admission, Shortage | None]:
        """Book the start of a request whole, or nothing of it."""
        is_privileged = self._is_privileged(request)
        may_claim = self.may_claim(request)
        if not may_claim and request.num_slots > self._ledger.slots:
            self._trace.lacks_slots(request, request.num_slots - self._ledger.slots)
            return Admission.SKIP, None
        if self._budget.is_share_spent(request) and request is not self._guarded:
            # Before others yield to it for nothing.
            self._trace.note(Refused(request.request_id, CoreRule.TENANT_SHARE.value, 0, 0))
            return Admission.SKIP, None
        if not is_privileged and self._delays_others(request):
            self._trace.note(Refused(request.request_id, CoreRule.DEADLINES.value, 0, 0))
            self.held_by = CoreRule.DEADLINES
            return Admission.WAIT, None
        savepoint = self._budget.savepoint()
        try:
            self._book(request, is_privileged)
        except _CannotStart as refusal:
            self._budget.restore(savepoint)
            if refusal.may_claim and may_claim:
                return refusal.answer, Shortage(request, max(0, refusal.num_blocks), refusal.num_slots)
            self._trace.note(refusal.note)
            return refusal.answer, None
        if self._shares is not None:
            self._shares.add(request)
        guard = CoreRule.GUARDED if request is self._guarded else CoreRule.CLAIM
        self._trace.admitted(self._budget.admissions[-1], guard if is_privileged else None)
        return Admission.ADMIT, None

    def may_claim(self, request: Request) -> bool:
        """Whether others may be made to yield to it."""
        if self._is_privileged(request) or self._outranks_someone(request):
            return True
        return self._shares is not None and self._shares.may_claim(request)

    def _is_privileged(self, request: Request) -> bool:
        return request is self._guarded or request.order in self._constraints.claimants

    def _delays_others(self, request: Request) -> bool:
        """Whether a running request that is no less urgent would miss its deadline beside this one."""
        if not self._state.options.deadline_shedding:
            return False
        if self._shares is not None and self._shares.is_owed(request):
            return False  # one tenant's deadlines keep no other from its share
        if self._gate is None:
            self._gate = DeadlineGate(self._state, self._running)
        return self._gate.holds(request, [start.request for start in self._budget.admissions])

    def _outranks_someone(self, request: Request) -> bool:
        """Whether anyone less urgent holds blocks or slots that this request may claim."""
        if self._least_priority is None:
            holders = (
                h for h in self._state.holders.values() if h.order not in self._constraints.preemptions
            )
            others = (other for group in (self._running, holders) for other in group)
            self._least_priority = min(
                (other.priority for other in others if other is not self._guarded), default=float("inf")
            )
        if request.priority > self._least_priority:
            return True
        return gives_way(self._state, self._guarded, request)

    def _book(self, request: Request, is_privileged: bool) -> None:
        """Raises _CannotStart; the caller then undoes what was booked."""
        budget, ledger = self._budget, self._ledger
        before = ledger.available
        if request.status is RequestStatus.SWAPPED:
            places, start = self._claim_swapped(request)
            num_unclaimed = 0
        else:
            places, start = self._claim_hits(request)
            if self._restoring is not None and may_use_tiers(request):
                place = places[request.computing[0].seq_id]
                start.restores.extend(self._restoring.book(request, place, may_wait=not is_privileged))
            producer = None if is_privileged else self._awaited_producer(request, places)
            if producer is not None:
                raise _CannotStart(AwaitsProducer(request.request_id, producer.request_id), may_claim=False)
            num_claimed = sum(len(held(tuple(blocks))) for blocks in start.claims.values())
            num_claimed += len(start.restores)
            num_claimed += self._claim_partial_blocks(request, places, start)
            num_held = len(self._manager.references(request))
            known = views.num_known_blocks(request, self._block_size)
            num_unclaimed = max(0, known - num_held - num_claimed)
        if request.num_slots > ledger.slots:
            short = request.num_slots - ledger.slots
            raise _CannotStart(_lacks(request, num_slots=short), num_unclaimed - ledger.available, short)
        if ledger.available < 0:
            raise _CannotStart(_lacks(request, before - ledger.available, before), -ledger.available)
        if not is_privileged:
            self._ask_policy(request, places, before, num_unclaimed)
        elif request is not self._guarded and num_unclaimed > ledger.available:
            raise _CannotStart(_lacks(request), num_unclaimed - ledger.available)
        num_chunks = len(budget.chunks)
        for sequence in request.computing:
            missing = budget.book_chunk(sequence, places[sequence.seq_id])
            if missing:
                num_left = ledger.available
                raise _CannotStart(_lacks(request, missing + num_left, num_left), missing)
        if len(budget.chunks) == num_chunks:
            raise _CannotStart(Refused(request.request_id, CoreRule.BUDGET.value, 0, 0), may_claim=False)
        if start.restores:
            budget.note_made(request.computing[0])
        ledger.slots -= request.num_slots
        budget.admissions.append(start)

    def _ask_policy(
        self, request: Request, places: dict[int, Place], available_before: int, num_unclaimed: int
    ) -> None:
        num_claimed = available_before - self._ledger.available
        lead = request.computing[0]
        place = places[lead.seq_id]
        end = place.num_computed + self._budget.allowance(request, place.remaining_of(lead))
        starting = [start.request for start in self._budget.admissions]
        watermark = self._state.watermark_blocks if self._running or starting else 0
        view = views.admission_view(
            request,
            num_blocks_first_chunk=num_claimed + max(0, blocks_for(end, self._block_size) - len(place.table)),
            num_blocks_known=num_claimed + num_unclaimed,
            num_blocks_held=len(self._manager.references(request)),
            watermark_blocks=watermark,
        )
        load = self._state.load(self._running + starting, available_before)
        promised = self._budget.num_promised
        if promised:
            load = replace(load, num_blocks_promised=promised)
        answer = self._state.policy_host.admission(view, load)
        if answer is not Admission.ADMIT:
            note = Refused(
                request.request_id,
                self._state.policy_host.names["admission"],
                max(view.num_blocks_known, view.num_blocks_first_chunk),
                available_before,
                watermark,
                num_promised=promised,
            )
            short = max(1, num_unclaimed + watermark + promised - self._ledger.available)
            raise _CannotStart(note, short, answer=answer)

    # --- what it can share -----------------------------------------------------------------

    def _claim_hits(self, request: Request) -> tuple[dict[int, Place], PlannedAdmission]:
        """Book the cached blocks that continue each table; what they cover need not be computed."""
        places: dict[int, Place] = {}
        claims: dict[int, list[int]] = {}
        for sequence in request.computing:
            table = self._manager.table(sequence)
            hits = self._manager.hits(sequence)
            for block_id in held(tuple(hits)):
                self._ledger.claim(block_id)
            claims[sequence.seq_id] = hits
            num_kv = sequence.num_kv_tokens + len(hits) * self._block_size
            num_computed = sequence.next_position(num_kv)
            places[sequence.seq_id] = Place((*table, *hits), num_computed, num_kv)
        return places, PlannedAdmission(request, claims, {})

    def _claim_partial_blocks(
        self, request: Request, places: dict[int, Place], start: PlannedAdmission
    ) -> int:
        """Book the partial blocks that continue what was claimed; how many of them need no copy.

        Last of all, so that none keeps a request from waiting for one that computes its next full block. A
        block that a chunk of this step writes to is left alone: it was booked without a copy.
        """
        num_without_copy = 0
        for sequence in request.computing:
            place = places[sequence.seq_id]
            if start.restores or place.num_kv != len(place.table) * self._block_size:
                continue
            hit = self._manager.partial_hit(sequence, place.table)
            if hit is None or self._ledger.is_overwritten(hit[0]):
                continue
            block_id, num_tokens = hit
            self._ledger.claim(block_id)
            num_without_copy += self._ledger.references(block_id) == 1
            start.claims[sequence.seq_id].append(block_id)
            start.partial_tokens[sequence.seq_id] = num_tokens
            place.table = (*place.table, block_id)
            place.num_kv += num_tokens
            place.num_computed = sequence.next_position(place.num_kv)
        return num_without_copy

    def _claim_swapped(self, request: Request) -> tuple[dict[int, Place], PlannedAdmission]:
        """Book the way back of a swapped request: blocks still cached are shared, the rest copied."""
        hits: dict[int, int] = {}
        for sequence in request.sequences:
            host_table = self._manager.host_table(sequence)
            for host_block, block_id in zip(host_table, self._manager.hits(sequence), strict=False):
                if NO_BLOCK not in (host_block, block_id):
                    hits.setdefault(host_block, block_id)
        places: dict[int, Place] = {}
        for sequence in request.sequences:
            host_table = self._manager.host_table(sequence)
            table = tuple(host if host == NO_BLOCK else hits.get(host, virtual(host)) for host in host_table)
            for block_id in held(table):
                self._ledger.claim(block_id)
            places[sequence.seq_id] = Place(table, sequence.num_computed_tokens, sequence.num_kv_tokens)
        return places, PlannedAdmission(request, {}, hits)

    def _awaited_producer(self, request: Request, places: dict[int, Place]) -> Request | None:
        """Another request that is computing the next block of this one right now."""
        producing = self._budget.producing
        lead = request.computing[0]
        place = places[lead.seq_id]
        index = len(place.table)
        if not producing or place.num_kv != index * self._block_size:
            return None
        if lead.next_scored < place.num_kv + self._block_size:
            return None  # its rows have to be computed all the same
        if (index + 1) * self._block_size > lead.num_known_tokens or request.new.bypass_prefix_cache:
            return None
        producer = producing.get(self._manager.block_hash(lead, index))
        is_awaited = (
            producer is not None
            and producer is not request
            and producer.status is not RequestStatus.FINISHED
            and producer.order not in self._constraints.preemptions
            and not producer.is_paused
        )
        return producer if is_awaited else None
