"""A request from acceptance to its terminal event, and its sequences.

What enters is a `NewRequest`, frozen. `Request` and `Sequence` are the scheduler's own mutable record of it;
only the core changes them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from pageturner.policies.interfaces import Reclaim
from pageturner.service.core.beam_search import BeamGroup, asked_of_sampler
from pageturner.service.core.drafting.draft_counts import FIRST_ODDS, FIRST_WHOLE_ODDS
from pageturner.service.core.drafting.ngram_index import NgramIndex
from pageturner.service.core.new_request import NewRequest as NewRequest
from pageturner.service.core.new_request import ResumedChoice as ResumedChoice
from pageturner.service.core.outlook import Drafting, Work
from pageturner.service.core.sample_row import SampleRow
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.token_log import TokenLog, TokenView

NOTHING_SCORED = sys.maxsize
"""A row that no sequence reaches."""


QueueEntry = tuple[tuple[tuple[int, float | str], ...], float, int]
"""Place in a queue: the policy's key made comparable, arrival time, order of acceptance."""


class RequestStatus(Enum):
    """WAITING holds no block, save one whose tail was reclaimed; SWAPPED holds host blocks only."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One choice of a request, or one beam of its search: its tokens and how far their KV has come.

    tokens: prompt and accepted outputs; only ever appended to, those of a beam also replaced. token_log: of
        them, once a sampler asks.
    sample_rows: what its steps ask the sampler for, where that is the same until the epoch is raised.
    num_given_tokens: leading tokens that came with the request: its prompt, and outputs that it resumes.
    ngrams: of its tokens, once drafts are looked for. draft_odds, whole_draft_odds: that a draft of it
        comes true, behind a part of a match and behind a whole one.
    mean_drafts, mean_gain: as `Drafting` has it, of its steps of late; None before the first.
    num_in_flight: tokens that an unfinished step samples (0 or 1); they follow `tokens`.
    num_drafts: guesses behind the last token that an unfinished step verifies. Their KV counts for nothing
        until then. has_whole_match: they are behind a whole match.
    num_computed_tokens: the next position to compute. Advanced when a step is scheduled.
    num_ever_computed: leading positions whose KV was made at some time and given up since.
    next_scored: the first row whose logits are wanted to score the token behind it, and have not come yet.
        It is computed whether or not its KV is there.
    num_kv_tokens: leading positions whose KV the table holds, unfinished steps included. It exceeds
        num_computed_tokens where rows are computed again for their logits only: the last, or scored ones.
    num_accepted_tokens: leading positions whose KV an ended step has made; these may be cached.
    num_offered_blocks: leading blocks that were handed over, or are about to be.
    last_step: the last step that computes it, or copies its blocks.
    epoch: raised whenever work in flight becomes void; results of an older epoch are dropped.
    """

    seq_id: int
    request: Request
    index: int
    tokens: list[int] = field(init=False)
    num_given_tokens: int = field(init=False)
    token_log: TokenLog | None = None
    sample_rows: tuple[SampleRow, ...] | None = None
    ngrams: NgramIndex | None = None
    draft_odds: float = FIRST_ODDS
    whole_draft_odds: float = FIRST_WHOLE_ODDS
    mean_drafts: float | None = None
    mean_gain: float | None = None
    block_hashes: list[bytes] = field(default_factory=list)
    epoch: int = 0
    is_finished: bool = False
    last_step: int = 0
    num_in_flight: int = 0
    num_drafts: int = 0
    has_whole_match: bool = False
    num_computed_tokens: int = 0
    num_ever_computed: int = 0
    num_kv_tokens: int = 0
    num_accepted_tokens: int = 0
    num_cached_blocks: int = 0
    num_offered_blocks: int = 0
    next_scored: int = NOTHING_SCORED

    def __post_init__(self) -> None:
        new = self.request.new
        self.tokens = list(new.prompt_token_ids)
        if new.is_scoring:
            self.next_scored = len(self.tokens) - 1
            self.tokens += new.resumed[self.index].token_ids[:-1]  # the last one is scored, never computed
        elif new.resumed:
            self.tokens += new.resumed[self.index].token_ids
        if new.num_score_top is not None and not new.is_scoring and not self.index:
            self.next_scored = 0 if len(new.prompt_token_ids) > 1 else NOTHING_SCORED
        self.num_given_tokens = len(self.tokens)

    @property
    def drafting(self) -> Drafting | None:
        """What guesses do to it; None while nothing is known."""
        if self.mean_drafts is None or self.mean_gain is None:
            return None
        return Drafting(self.mean_drafts, self.mean_gain)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated and accepted, here or where the answer began."""
        return len(self.tokens) - self.request.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        """Tokens to compute until the next one can be sampled; 0 if none is to be sampled (yet).

        A lead whose choices wait for its table stops at the end of what they share, mostly the prompt.
        A sampler that looks at the history must have it whole, so such a sequence does not run ahead.
        """
        request, num_in_flight = self.request, self.num_in_flight
        if not request.is_forked:
            return request.num_shared_tokens - self.num_computed_tokens
        num_tokens = len(self.tokens) + num_in_flight
        if num_tokens >= request.max_total_tokens or (num_in_flight and request.needs_history):
            return 0
        return num_tokens - self.num_computed_tokens

    @property
    def num_known_tokens(self) -> int:
        """Tokens it may compute now: all it has, or before a fork those that all have."""
        return len(self.tokens) if self.request.is_forked else self.request.num_shared_tokens

    def output_view(self) -> TokenView:
        """The accepted outputs of this moment."""
        if self.token_log is None:
            self.token_log = TokenLog(self.tokens)
        return self.token_log.view(self.request.num_prompt_tokens, len(self.tokens))

    def reset(self, num_kv_tokens: int, block_size: int) -> None:
        """Void work in flight; KV of the first `num_kv_tokens` positions stays."""
        self.epoch += 1
        self.sample_rows = None
        self.num_in_flight = self.num_drafts = 0
        self.num_ever_computed = max(self.num_ever_computed, self.num_accepted_tokens)
        self.set_kv(num_kv_tokens)
        self.num_cached_blocks = min(self.num_cached_blocks, num_kv_tokens // block_size)

    def set_kv(self, num_kv_tokens: int) -> None:
        """KV up to here is there. At least the last token of interest is left to compute: it yields
        logits, or at the end of a prompt the moment to fork."""
        self.num_kv_tokens = num_kv_tokens
        self.num_accepted_tokens = num_kv_tokens
        self.num_computed_tokens = self.next_position(num_kv_tokens)

    def next_position(self, num_kv_tokens: int) -> int:
        """Where it goes on with KV up to there: rows whose logits are wanted are computed all the same, and
        write nothing."""
        return min(num_kv_tokens, self.num_known_tokens - 1, self.next_scored)

    def scored_tokens(self, first: int, end: int) -> tuple[int, ...]:
        """The known tokens that rows first .. end-1 score, first at least `next_scored`."""
        request = self.request
        num_prompt_tokens = request.num_prompt_tokens
        if request.new.is_scoring:
            before = num_prompt_tokens - 1
            return request.new.resumed[self.index].token_ids[first - before : end - before]
        return request.new.prompt_token_ids[first + 1 : end + 1]


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """A live request. Queueing, admission and preemption take it whole.

    is_forked: every sequence has its own table. Before that only the first unfinished one, the lead,
    computes, and no further than num_shared_tokens; the others wait for its table.
    num_shared_tokens: leading tokens that all sequences have: the prompt, and outputs that all beams have.
    beams: where its beam search stands; None for one that samples. row_params: what its rows ask the sampler.
    queue_entry: its place in the order of the queue policy, as last computed; None before the first time.
    policies: names of those in force when it was accepted.
    max_total_tokens, min_total_tokens: of one sequence, prompt and output. stop_ids, has_timely_ends: as
        NewRequest says, kept since every step asks; stops: the same ids, for a quick look. needs_history: a
        token is asked for once all those before it are known.
    """

    new: NewRequest
    order: int
    max_tokens: int
    root_hash: bytes
    num_prompt_tokens: int = field(init=False)
    num_shared_tokens: int = field(init=False)
    max_total_tokens: int = field(init=False)
    min_total_tokens: int = field(init=False)
    needs_history: bool = field(init=False)
    stop_ids: tuple[int, ...] = field(init=False)
    stops: frozenset[int] = field(init=False)
    row_params: SamplingParams = field(init=False)
    beams: BeamGroup | None = field(init=False)
    has_timely_ends: bool = field(init=False)
    status: RequestStatus = RequestStatus.WAITING
    sequences: list[Sequence] = field(default_factory=list)
    is_forked: bool = field(init=False)
    is_paused: bool = False
    num_blocks_peak: int = 0
    num_bypasses: int = 0
    num_step_failures: int = 0
    num_cached_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_drafts: int = 0
    num_preemptions_by_kind: dict[Reclaim, int] = field(default_factory=lambda: dict.fromkeys(Reclaim, 0))
    queued_since: float = field(init=False)
    queue_seconds: float = 0.0
    queue_entry: QueueEntry | None = None
    policies: Mapping[str, str] = field(default_factory=dict)
    admitted_at: float | None = None
    first_token_at: float | None = None

    def __post_init__(self) -> None:
        new = self.new
        self.num_prompt_tokens = self.num_shared_tokens = len(new.prompt_token_ids)
        self.max_total_tokens = self.num_prompt_tokens + self.max_tokens
        self.min_total_tokens = self.num_prompt_tokens + new.params.min_tokens
        self.needs_history = new.params.needs_history
        self.stop_ids = new.stop_ids
        self.stops = frozenset(self.stop_ids)
        self.has_timely_ends = new.has_timely_ends
        self.row_params, self.beams = new.params, None
        if new.params.beam_search is not None:
            self.row_params, self.beams = asked_of_sampler(new.params, self.stop_ids), BeamGroup()
            self.needs_history = True
        self.is_forked = new.params.num_sequences == 1
        self.queued_since = new.arrival_time

    @property
    def request_id(self) -> str:
        return self.new.request_id

    @property
    def priority(self) -> int:
        return self.new.priority

    @property
    def work(self) -> Work:
        """All that it asks for, whatever of it is done."""
        n = self.new.params.num_sequences
        return Work(self.num_prompt_tokens, n, n * self.max_tokens)

    @property
    def unfinished(self) -> list[Sequence]:
        """Sequences that have yet to end."""
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    @property
    def computing(self) -> list[Sequence]:
        """The sequences that may be scheduled: all that are unfinished, or before a fork the lead."""
        if len(self.sequences) == 1:
            return self.sequences
        return self.unfinished if self.is_forked else self.unfinished[:1]

    @property
    def last_step(self) -> int:
        """The last step that has to do with any of its sequences: the fence of whatever it releases."""
        return max(sequence.last_step for sequence in self.sequences)

    @property
    def num_slots(self) -> int:
        """Sequences this request runs, or will once forked; reserved at admission."""
        return 1 if len(self.sequences) == 1 else len(self.unfinished)

    @property
    def num_preemptions(self) -> int:
        """Times the request yielded, by any means."""
        return sum(self.num_preemptions_by_kind.values())
