"""What one attempt has booked so far: blocks and slots on a ledger, tokens of a budget, chunks.

Everything here can be undone: an attempt that ends in a shortage is thrown away, and a start that does
not fit goes back to its savepoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from pageturner.policies.interfaces import BatchSplit
from pageturner.service.core.memory.block_manager import blocks_for
from pageturner.service.core.memory.window import num_dropped
from pageturner.service.core.request import Request, RequestStatus, Sequence
from pageturner.service.core.scheduling.decode import has_slot_of_its_own
from pageturner.service.core.scheduling.ledger import Ledger, LedgerSavepoint
from pageturner.service.core.scheduling.state import SchedulerState
from pageturner.service.core.scheduling.step_plan import Chunk, PlannedAdmission


@dataclass(slots=True)
class Place:
    """Where a sequence stands when its chunk starts: its table, next position, positions with KV."""

    table: tuple[int, ...]
    num_computed: int
    num_kv: int

    def remaining_of(self, sequence: Sequence) -> int:
        """Tokens left to compute from here."""
        return sequence.num_remaining + sequence.num_computed_tokens - self.num_computed


@dataclass(frozen=True, slots=True)
class Savepoint:
    """What was booked, to return to."""

    ledger: LedgerSavepoint
    budget: tuple[int, int, int, int]
    shares: dict[str, int] | None
    num_chunks: int
    num_promised: int


class StepBudget:
    """guarded: owed one token whatever the split. slots: sequences that may start.

    producing: hashes that chunks of this step, or of the last, are making. planned_producing: of this
    step alone. total_left, decode_left, prefill_left: tokens of budget. scored_left: rows that may yet score
    known tokens. num_promised: blocks that those booked have yet to take, in later steps, for tokens they
    know already.
    """

    def __init__(self, state: SchedulerState, guarded: Request | None, slots: int) -> None:
        self._state = state
        self._manager = state.manager
        self._block_size = state.manager.block_size
        self._guarded = guarded
        self.ledger = Ledger(state.manager, slots)
        self.chunks: list[Chunk] = []
        self.admissions: list[PlannedAdmission] = []
        self.producing = dict(state.producing)
        self.planned_producing: dict[bytes, Request] = {}
        self.total_left = state.options.max_num_batched_tokens
        self.decode_left = 0
        self.prefill_left = 0
        self.scored_left = state.options.max_scored_rows
        self._scored_row_cost = state.options.scored_row_cost or 1.0
        self.num_promised = 0
        self._chunk_tokens: int | None = None
        self._shares: dict[str, int] | None = None

    def divide(self, shares: dict[str, int] | None) -> None:
        """Give each tenant so many tokens of the step at most."""
        self._shares = shares

    def is_share_spent(self, request: Request) -> bool:
        """Whether its tenant may compute no more in this step."""
        return self._shares is not None and self._shares.get(request.new.tenant, 0) <= 0

    def split_budget(self, split: BatchSplit) -> None:
        self.decode_left = split.decode_tokens
        self.prefill_left = split.prefill_tokens
        self._chunk_tokens = split.chunk_tokens

    @property
    def has_budget(self) -> bool:
        """Whether one more token may be computed in this step."""
        return min(self.total_left, self.prefill_left + self.decode_left) > 0

    def savepoint(self) -> Savepoint:
        """What `restore` goes back to."""
        budget = (self.total_left, self.decode_left, self.prefill_left, self.scored_left)
        shares = None if self._shares is None else dict(self._shares)
        return Savepoint(self.ledger.savepoint(), budget, shares, len(self.chunks), self.num_promised)

    def restore(self, savepoint: Savepoint) -> None:
        """Forget chunks and bookings made since."""
        self.ledger.restore(savepoint.ledger)
        self.total_left, self.decode_left, self.prefill_left, self.scored_left = savepoint.budget
        self._shares = savepoint.shares
        del self.chunks[savepoint.num_chunks :]
        self.num_promised = savepoint.num_promised

    def allowance(self, request: Request, remaining: int) -> int:
        """Tokens of budget this request may use now; the guarded request is owed one.

        The batch policy has counted the decodes of running requests among its decode tokens. One that starts
        with a single token left, fresh from the host, was not, and takes from their share only where no
        other is left.
        """
        return max(0, min(self._room(request, remaining), remaining))

    def _room(self, request: Request, remaining: int) -> int:
        """The same, whatever it lacks."""
        if remaining == 1 and request.status is RequestStatus.RUNNING:
            allowed = self.decode_left
        elif remaining == 1:
            allowed = self.prefill_left or self.decode_left
        elif self._chunk_tokens is None:
            allowed = self.prefill_left
        else:
            allowed = min(self.prefill_left, self._chunk_tokens)
        if self._shares is not None:
            allowed = min(allowed, self._shares.get(request.new.tenant, 0))
        if request is self._guarded:
            allowed = max(allowed, 1)
        return min(allowed, self.total_left)

    def _fitting_scored(self, request: Request, remaining: int, num_unscored: int) -> int:
        """Rows behind so many others that may score known tokens; one at least where it comes first."""
        room = self._room(request, remaining) - num_unscored
        if remaining > 1:
            room = max(int(room / self._scored_row_cost), min(room, 1) if not num_unscored else 0)
        return max(0, min(room, self.scored_left))

    def _cost(self, num_tokens: int, num_scored: int, room: int) -> int:
        """Tokens of budget that a chunk is worth. A single one is a decode's equal, whose head is in the step
        anyway."""
        if num_tokens == 1:
            return 1
        return max(num_tokens, min(room, num_tokens + int((self._scored_row_cost - 1) * num_scored)))

    def book_in_place(self, sequence: Sequence) -> bool:
        """Book one decoded token if its slot is there already and the sequence's own; else nothing."""
        if self.decode_left <= 0 or self.total_left <= 0:
            return False
        shares, tenant = self._shares, sequence.request.new.tenant
        if shares is not None and shares.get(tenant, 0) <= 0:
            return False
        if not has_slot_of_its_own(self._manager, sequence):
            return False
        self.total_left -= 1
        self.decode_left -= 1
        if shares is not None:
            shares[tenant] -= 1
        self.chunks.append(Chunk(sequence, 1, is_last=True, is_in_place=True))
        return True

    def book_chunk(self, sequence: Sequence, place: Place) -> int:
        """Book the next chunk of a sequence, shortened to what fits; none if there is nothing to do.

        Returns how many blocks are missing if not even one token fits, else 0.
        """
        request = sequence.request
        remaining = place.remaining_of(sequence)
        num_tokens = self.allowance(request, remaining)
        num_unscored = max(0, sequence.next_scored - place.num_computed)
        if num_tokens > num_unscored:
            num_scored = self._fitting_scored(request, remaining, num_unscored)
            num_tokens = min(num_tokens, num_unscored + num_scored)
        ledger, block_size = self.ledger, self._block_size
        if num_tokens <= 0:
            self._promise(request, place, len(place.table), remaining)
            return 0
        num_held, start = len(place.table), place.num_computed
        write_index = place.num_kv // block_size
        written = shared = None
        if start + num_tokens > place.num_kv and write_index < num_held:
            written = place.table[write_index]
            if ledger.references(written) > 1:
                shared = written
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
                written, shared, copies = None, None, 0
            needed = blocks_for(start + num_tokens, block_size) - num_held + copies
        if needed > 0:
            ledger.take(needed)
        if shared is not None:
            ledger.drop((shared,), in_flight=False)
        elif written is not None:
            ledger.overwrite(written)
        num_scored = max(0, num_tokens - num_unscored)
        self.scored_left -= num_scored
        self._spend(request, remaining, self._cost(num_tokens, num_scored, self._room(request, remaining)))
        self.chunks.append(Chunk(sequence, num_tokens, is_last=num_tokens == remaining))
        if remaining > 1:
            self._promise(request, place, blocks_for(start + num_tokens, block_size), remaining)
            self.note_made(sequence)
        return 0

    def note_made(self, sequence: Sequence) -> None:
        """Its full blocks that are not cached yet are being made, or copied, for it."""
        made = dict.fromkeys(self._state.uncached_hashes(sequence), sequence.request)
        self.planned_producing.update(made)
        self.producing.update(made)

    def _promise(self, request: Request, place: Place, num_taken: int, remaining: int) -> None:
        """Count the blocks that a sequence has yet to take behind `num_taken` for the tokens that it knows. A
        sliding window gives some back meanwhile: it never holds more than its request does at the peak."""
        num_left = max(0, blocks_for(place.num_computed + remaining, self._block_size) - num_taken)
        num_held = num_taken - num_dropped(place.table)
        self.num_promised += min(num_left, max(0, request.num_blocks_peak - num_held))

    def _spend(self, request: Request, remaining: int, num_tokens: int) -> None:
        """num_tokens: of budget."""
        self.total_left -= num_tokens
        if self._shares is not None:
            self._shares[request.new.tenant] = self._shares.get(request.new.tenant, 0) - num_tokens
        decodes = remaining == 1 and (request.status is RequestStatus.RUNNING or not self.prefill_left)
        if decodes and self.decode_left > 0:
            self.decode_left -= num_tokens
        else:
            self.prefill_left = max(0, self.prefill_left - num_tokens)
