"""What one step will do, decided but not yet done."""

from __future__ import annotations

from dataclasses import dataclass, field

from pageturner.policies.interfaces import Reclaim
from pageturner.service.core.decisions import Decision
from pageturner.service.core.outputs import record
from pageturner.service.core.request import Request, Sequence


@dataclass(frozen=True, slots=True)
class Preemption:
    """A request gives up blocks. cuts: for a tail reclaim, (sequence, blocks it keeps) of each one cut.
    by: the reclaim policy, or the guard that left it no choice."""

    request: Request
    how: Reclaim
    cuts: tuple[tuple[Sequence, int], ...] = ()
    by: str = ""


@dataclass(frozen=True, slots=True)
class PlannedAdmission:
    """A waiting or swapped request becomes running.

    claims: cached blocks that continue each sequence's table. partial_tokens: where the last of them is a
    partial block, the tokens that it holds. host_hits: for a swapped request, host block -> cached device
    block with the same content. restores: cached blocks of the host that continue what its one sequence
    claims, to be copied back.
    """

    request: Request
    claims: dict[int, list[int]]
    host_hits: dict[int, int]
    partial_tokens: dict[int, int] = field(default_factory=dict)
    restores: list[int] = field(default_factory=list)

    def num_full_claims(self, seq_id: int) -> int:
        """Full blocks that the sequence claims."""
        return len(self.claims[seq_id]) - (seq_id in self.partial_tokens)

    def num_hit_tokens(self, block_size: int) -> int:
        """Tokens of all sequences that cached blocks cover, of whichever tier."""
        num_full = len(self.host_hits) + len(self.restores) + sum(map(self.num_full_claims, self.claims))
        return num_full * block_size + sum(self.partial_tokens.values())


@record
class Chunk:
    """The next `num_tokens` tokens of a sequence are computed.

    is_last: they reach the last known token, so that the next one can be sampled (or the prompt forked).
    is_in_place: their slots are there, in a block that the sequence alone holds and that is not cached.
    """

    sequence: Sequence
    num_tokens: int
    is_last: bool
    is_in_place: bool = False


@dataclass(frozen=True, slots=True)
class Shortage:
    """The claimant lacks so many blocks and slots, and may make others yield."""

    claimant: Request
    num_blocks: int
    num_slots: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """preemptions happen first, then admissions, then chunks.

    decodes: of an ordinary step, in place of chunks: each computes its last token, whose slot is its own or
    the first of a block that it does not have yet.
    bypassed: requests that were looked past. producing: hashes that the chunks of this step, and of
    the last, are making; waiting requests may wait for them. notes: what was decided, if that is noted.
    guarded: the request that no policy could hold back.
    """

    preemptions: tuple[Preemption, ...]
    admissions: tuple[PlannedAdmission, ...]
    chunks: tuple[Chunk, ...]
    bypassed: tuple[Request, ...]
    producing: dict[bytes, Request]
    guarded: Request | None
    notes: tuple[Decision, ...] = ()
    decodes: tuple[Sequence, ...] = ()


@dataclass(slots=True)
class Constraints:
    """Keys are `Request.order`.

    preemptions: who gives up blocks. stalled: running requests to which no other yields in this step; they
    do with what is there. blocked: waiting requests left out.
    claimants: waiting requests for whom others yield; no admission policy is asked for them.
    await_pending: a claimant is left out because what it needs falls free when the step in flight ends.
    """

    preemptions: dict[int, Preemption] = field(default_factory=dict)
    stalled: set[int] = field(default_factory=set)
    blocked: set[int] = field(default_factory=set)
    claimants: set[int] = field(default_factory=set)
    await_pending: bool = False
