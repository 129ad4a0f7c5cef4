"""One attempt to fill a step: walks requests in order and books each on a scratch ledger.

An attempt changes nothing. It ends with a plan, or with the first shortage for which others may yield;
the planner then decides who does and attempts again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pageturner.policies.interfaces import Admission, Reclaim
from pageturner.policies.views import BatchView
from pageturner.service.core import views
from pageturner.service.core.block_manager import BlockManager, blocks_for
from pageturner.service.core.ledger import Ledger, virtual
from pageturner.service.core.plan import Chunk, Plan, Shortage, Start, Yield
from pageturner.service.core.request import Request, RequestStatus, Sequence
from pageturner.service.core.state import SchedulerState


@dataclass(slots=True)
class Constraints:
    """What earlier attempts of this step settled. Keys are `Request.order`.

    yields: who gives up blocks. stalled: running requests for whom nobody else yields in this step; they
    do with what is there. blocked: waiting requests left out.
    claimants: waiting requests for whom others yield; no admission policy is asked for them.
    await_pending: a claimant is left out because what it needs falls free when the step in flight ends.
    """

    yields: dict[int, Yield] = field(default_factory=dict)
    stalled: set[int] = field(default_factory=set)
    blocked: set[int] = field(default_factory=set)
    claimants: set[int] = field(default_factory=set)
    await_pending: bool = False


@dataclass(slots=True)
class _Place:
    """Where a sequence will stand when its chunk starts: its table, next position, positions with KV."""

    table: list[int]
    num_computed: int
    num_kv: int


class _Refused(Exception):
    """A start that does not fit or may not happen.

    num_blocks, num_slots: what is missing. may_claim: whether others yielding would help. answer: what
    it means for those behind.
    """

    def __init__(
        self,
        num_blocks: int = 0,
        num_slots: int = 0,
        *,
        may_claim: bool = True,
        answer: Admission = Admission.SKIP,
    ) -> None:
        super().__init__()
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.may_claim = may_claim
        self.answer = answer


class Attempt:
    """state: read only. champion: planned first, refused by no policy."""

    def __init__(self, state: SchedulerState, champion: Request | None, constraints: Constraints) -> None:
        self._state = state
        self._manager = state.manager
        self._block_size = state.manager.block_size
        self._champion = champion
        self._constraints = constraints
        self._running = [r for order, r in state.running.items() if order not in constraints.yields]
        self._total_left = state.options.max_num_batched_tokens
        self._decode_left = 0
        self._prefill_left = 0
        self._chunk_tokens: int | None = None
        self._producing = dict(state.producing)
        self._planned_producing: dict[bytes, Request] = {}
        self._chunks: list[Chunk] = []
        self._starts: list[Start] = []
        self._bypassed: list[Request] = []
        slots = state.options.max_num_seqs - sum(request.num_slots for request in self._running)
        self.ledger = Ledger(state.manager, slots)
        self.num_booked: dict[int, int] = {}
        for given_up in constraints.yields.values():
            book_yield(self.ledger, state.manager, given_up, state.last_ended_step)

    def run(self) -> Plan | Shortage:
        """The whole step, or the first shortage for which others may yield."""
        state, champion = self._state, self._champion
        schedulable = [
            request for request in self._running if not request.is_paused and state.may_run(request)
        ]
        self._split_budget(schedulable)
        shortage = None
        if champion is not None and champion.status is RequestStatus.RUNNING:
            if champion in schedulable:
                schedulable.remove(champion)
                schedulable.insert(0, champion)
        elif champion is not None and champion.order not in self._constraints.blocked:
            shortage = self._try_start(champion)[1]
        for request in schedulable:
            shortage = shortage or self._continue(request)
            if shortage is not None:
                return shortage
        shortage = shortage or self._admit()
        if shortage is not None:
            return shortage
        return Plan(
            tuple(self._constraints.yields.values()),
            tuple(self._starts),
            tuple(self._chunks),
            tuple(self._bypassed),
            self._planned_producing,
        )

    # --- the token budget ------------------------------------------------------------------

    def _split_budget(self, schedulable: Iterable[Request]) -> None:
        num_decodes, prefills = 0, []
        for request in schedulable:
            for sequence in request.computing:
                remaining = request.num_remaining(sequence)
                if remaining == 1:
                    num_decodes += 1
                elif remaining > 1:
                    prefills.append(remaining)
        batch = BatchView(self._total_left, num_decodes, tuple(prefills), len(self._state.waiting))
        split = self._state.guard.batch_split(batch)
        self._decode_left = split.decode_tokens
        self._prefill_left = split.prefill_tokens
        self._chunk_tokens = split.chunk_tokens

    def _allowance(self, request: Request, remaining: int) -> int:
        """Tokens of budget this request may use now; the champion is owed one."""
        if remaining == 1:
            allowed = self._decode_left or self._prefill_left
        elif self._chunk_tokens is None:
            allowed = self._prefill_left
        else:
            allowed = min(self._prefill_left, self._chunk_tokens)
        if request is self._champion:
            allowed = max(allowed, 1)
        return max(0, min(allowed, remaining, self._total_left))

    def _spend(self, remaining: int, num_tokens: int) -> None:
        self._total_left -= num_tokens
        if remaining == 1 and self._decode_left > 0:
            self._decode_left -= num_tokens
        else:
            self._prefill_left = max(0, self._prefill_left - num_tokens)

    # --- running requests ------------------------------------------------------------------

    def _continue(self, request: Request) -> Shortage | None:
        before = self.ledger.available
        shortage = None
        for sequence in request.computing:
            place = _Place(self._manager.peek(sequence), sequence.num_computed_tokens, sequence.num_kv_tokens)
            missing = self._book_chunk(request, sequence, place)
            if missing and request.order not in self._constraints.stalled:
                shortage = Shortage(request, missing)
                break
        self.num_booked[request.order] = before - self.ledger.available
        return shortage

    def _book_chunk(self, request: Request, sequence: Sequence, place: _Place) -> int:
        """Book the next chunk of a sequence, shortened to what fits; none if there is nothing to do.

        Returns how many blocks are missing if not even one token fits, else 0.
        """
        remaining = _remaining(request, sequence, place)
        num_tokens = self._allowance(request, remaining)
        if num_tokens <= 0:
            return 0
        ledger, block_size = self.ledger, self._block_size
        num_held, start = len(place.table), place.num_computed
        write_index = place.num_kv // block_size
        shared = None
        if start + num_tokens > place.num_kv and write_index < num_held:
            block_id = place.table[write_index]
            if ledger.references(block_id) > 1:
                shared = block_id
        copies = 0 if shared is None else 1
        needed = blocks_for(start + num_tokens, block_size) - num_held + copies
        if needed > 0 and needed > ledger.available:
            room = max(0, ledger.available - copies)
            fitting = (num_held + room) * block_size - start
            if copies > ledger.available:
                fitting = place.num_kv - start
            if fitting < 1:
                least = blocks_for(start + 1, block_size) - num_held + copies
                return least - ledger.available
            num_tokens = min(num_tokens, fitting)
            if start + num_tokens <= place.num_kv:
                shared, copies = None, 0
            needed = blocks_for(start + num_tokens, block_size) - num_held + copies
        if needed > 0:
            ledger.take(needed)
        if shared is not None:
            ledger.drop((shared,), in_flight=False)
        self._spend(remaining, num_tokens)
        self._chunks.append(Chunk(sequence, num_tokens))
        if remaining > 1:
            made = dict.fromkeys(self._state.unpublished_digests(sequence), request)
            self._planned_producing.update(made)
            self._producing.update(made)
        return 0

    # --- waiting requests ------------------------------------------------------------------

    def _admit(self) -> Shortage | None:
        """Start waiting requests in order, looking past a bounded number that do not fit.

        Whoever has been overtaken often enough is overtaken no more: admissions hold until it starts.
        """
        state, constraints = self._state, self._constraints
        passed: list[Request] = []
        patience = state.options.max_bypasses
        for request in state.waiting:
            if min(self._total_left, self._prefill_left + self._decode_left) <= 0 or patience <= 0:
                break
            if (
                request is self._champion
                or request.is_paused
                or request.order in constraints.yields
                or not state.may_run(request)
            ):
                continue
            if constraints.yields and request.order not in constraints.claimants:
                continue
            answer = Admission.SKIP
            if request.order not in constraints.blocked:
                answer, shortage = self._try_start(request)
                if shortage is not None:
                    return shortage
            if answer is Admission.ADMIT:
                self._bypassed.extend(passed)
                patience -= bool(passed)
                continue
            passed.append(request)
            patience = min(patience, state.options.max_bypasses - request.num_bypasses)
            if answer is Admission.WAIT or len(passed) > state.options.max_skips:
                break
        return None

    def _try_start(self, request: Request) -> tuple[Admission, Shortage | None]:
        """Book the start of a request whole, or nothing of it."""
        checkpoint = self.ledger.checkpoint()
        budget = (self._total_left, self._decode_left, self._prefill_left)
        num_chunks = len(self._chunks)
        is_privileged = request is self._champion or request.order in self._constraints.claimants
        try:
            self._book_start(request, is_privileged)
        except _Refused as refusal:
            self.ledger.restore(checkpoint)
            self._total_left, self._decode_left, self._prefill_left = budget
            del self._chunks[num_chunks:]
            if refusal.may_claim and (is_privileged or self._outranks_someone(request)):
                return refusal.answer, Shortage(request, max(0, refusal.num_blocks), refusal.num_slots)
            return refusal.answer, None
        return Admission.ADMIT, None

    def _outranks_someone(self, request: Request) -> bool:
        return any(r.priority < request.priority and r is not self._champion for r in self._running)

    def _book_start(self, request: Request, is_privileged: bool) -> None:
        """Raises _Refused; the caller then undoes what was booked."""
        ledger, before = self.ledger, self.ledger.available
        if request.status is RequestStatus.SWAPPED:
            places, start = self._claim_swapped(request)
            num_unclaimed = 0
        else:
            places, start = self._claim_hits(request)
            if not is_privileged and self._awaits_producer(request, places):
                raise _Refused(may_claim=False)
            num_claimed = sum(len(blocks) for blocks in start.claims.values())
            num_held = len(self._manager.references(request))
            known = views.num_known_blocks(request, self._block_size)
            num_unclaimed = max(0, known - num_held - num_claimed)
        if request.num_slots > ledger.slots:
            raise _Refused(num_unclaimed - ledger.available, request.num_slots - ledger.slots)
        if ledger.available < 0:
            raise _Refused(-ledger.available)
        if not is_privileged:
            self._ask_policy(request, places, before, num_unclaimed)
        elif request is not self._champion and num_unclaimed > ledger.available:
            raise _Refused(num_unclaimed - ledger.available)
        num_chunks = len(self._chunks)
        for sequence in request.computing:
            missing = self._book_chunk(request, sequence, places[sequence.seq_id])
            if missing:
                raise _Refused(missing)
        if len(self._chunks) == num_chunks:
            raise _Refused(may_claim=False)
        ledger.slots -= request.num_slots
        self._starts.append(start)

    def _ask_policy(
        self, request: Request, places: dict[int, _Place], available_before: int, num_unclaimed: int
    ) -> None:
        num_claimed = available_before - self.ledger.available
        lead = request.computing[0]
        place = places[lead.seq_id]
        end = place.num_computed + self._allowance(request, _remaining(request, lead, place))
        watermark = self._state.watermark_blocks if self._running or self._starts else 0
        view = views.admission_view(
            request,
            num_blocks_first_chunk=num_claimed + max(0, blocks_for(end, self._block_size) - len(place.table)),
            num_blocks_known=num_claimed + num_unclaimed,
            num_blocks_held=len(self._manager.references(request)),
            watermark_blocks=watermark,
        )
        running = self._running + [start.request for start in self._starts]
        answer = self._state.guard.admission(view, self._state.load(running, available_before))
        if answer is not Admission.ADMIT:
            raise _Refused(max(1, num_unclaimed + watermark - self.ledger.available), answer=answer)

    def _claim_hits(self, request: Request) -> tuple[dict[int, _Place], Start]:
        """Book the cached blocks that continue each table; what they cover need not be computed."""
        places: dict[int, _Place] = {}
        claims: dict[int, list[int]] = {}
        for sequence in request.computing:
            table = list(self._manager.peek(sequence))
            num_kv = sequence.num_kv_tokens
            end = len(sequence.tokens) if request.is_forked else request.num_prompt_tokens
            hits = []
            if num_kv == len(table) * self._block_size:
                hits = self._manager.match(sequence, end)
            for block_id in hits:
                self.ledger.claim(block_id)
            claims[sequence.seq_id] = hits
            num_kv += len(hits) * self._block_size
            places[sequence.seq_id] = _Place(table + hits, min(num_kv, end - 1), num_kv)
        return places, Start(request, claims, {})

    def _claim_swapped(self, request: Request) -> tuple[dict[int, _Place], Start]:
        """Book the way back of a swapped request: blocks still cached are shared, the rest copied."""
        hits: dict[int, int] = {}
        for sequence in request.sequences:
            host_table = self._manager.host_table(sequence)
            for host_block, block_id in zip(
                host_table, self._manager.match(sequence, sequence.num_kv_tokens, first_index=0), strict=False
            ):
                hits.setdefault(host_block, block_id)
        places: dict[int, _Place] = {}
        for sequence in request.sequences:
            table = [hits.get(host, virtual(host)) for host in self._manager.host_table(sequence)]
            for block_id in table:
                self.ledger.claim(block_id)
            places[sequence.seq_id] = _Place(table, sequence.num_computed_tokens, sequence.num_kv_tokens)
        return places, Start(request, {}, hits)

    def _awaits_producer(self, request: Request, places: dict[int, _Place]) -> bool:
        """Whether the next block of the request is being computed by another one right now."""
        lead = request.computing[0]
        place = places[lead.seq_id]
        index = len(place.table)
        end = len(lead.tokens) if request.is_forked else request.num_prompt_tokens
        if not self._producing or place.num_kv != index * self._block_size:
            return False
        if (index + 1) * self._block_size > end or request.new.bypass_prefix_cache:
            return False
        producer = self._producing.get(self._manager.digest(lead, index))
        return (
            producer is not None
            and producer is not request
            and producer.status is not RequestStatus.FINISHED
            and producer.order not in self._constraints.yields
            and not producer.is_paused
        )


def _remaining(request: Request, sequence: Sequence, place: _Place) -> int:
    """Tokens left to compute once the sequence stands at `place`."""
    return request.num_remaining(sequence) + sequence.num_computed_tokens - place.num_computed


def book_yield(ledger: Ledger, manager: BlockManager, given_up: Yield, last_ended_step: int) -> None:
    """Book what a yielding request gives back."""
    request = given_up.request
    in_flight = request.last_step > last_ended_step
    if given_up.how is Reclaim.TAIL:
        for sequence, num_kept in given_up.cuts:
            ledger.drop(reversed(manager.peek(sequence)[num_kept:]), in_flight=in_flight)
        return
    for sequence in request.sequences:
        ledger.drop(reversed(manager.peek(sequence)), in_flight=in_flight)
