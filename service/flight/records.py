"""What a flight record holds: where it starts, then every call of the scheduler and what came of it.

No prompt, no output, no token id: see `block_names`. Request ids and tenants stand as they are.
Every entry says when (`now`: the scheduler's clock, which moves with its steps), what was decided, and
in `raised` the type of what the scheduler raised instead of an answer, if it did.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, TypeAlias

from pageturner.policies.spec import PolicySpec
from pageturner.policies.views import Rates
from pageturner.service.core.decisions import Decision
from pageturner.service.core.memory.transfers import TransferEnd
from pageturner.service.core.options import CacheOptions, SchedulerOptions, SpeculationOptions
from pageturner.service.core.outputs import BlockCopies, SampleRow, SchedulerOutput, ScoreRun
from pageturner.service.core.request import NewRequest, QueueEntry, RequestStatus, ResumedChoice
from pageturner.service.core.sampling_params import BeamSearch, SamplingParams
from pageturner.service.core.scheduling.snapshot import SchedulerSnapshot
from pageturner.service.core.structured_output import OutputForm, StructuredOutput
from pageturner.service.errors import PageturnerError
from pageturner.service.flight.beam_records import RecordedBeams
from pageturner.service.flight.block_names import stand_ins

ROW_FIELDS = ("seq_id", "start", "num_tokens", "num_blocks", "last_block")
DRAFT_FIELDS = ("seq_id", "num_found", "is_whole")
LOW = 0xFFFFFFFF
"""Enough of a sequence's number to tell it from any other in the record."""

STOP_STAND_IN = -2
"""In a replay, the token that ends a beam; no name of a block and no candidate's stand-in is negative."""

_ANY_FORM = StructuredOutput(OutputForm.JSON_OBJECT)
"""That of a request whose beams have one: an end is then the sampler's to allow, below min_tokens too."""

_HISTORY = 1.0
"""A presence penalty, any but 0: what the sampler needs the history for is not recorded."""

Scalar: TypeAlias = bool | int | float | str | None

PolicySpecs: TypeAlias = Mapping[str, PolicySpec]
"""By axis."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a scheduler is made of, save for its policies and secrets. version: of the program. speculation:
    none in records that were written before there was any."""

    version: str
    options: SchedulerOptions
    cache: CacheOptions
    rates: Rates
    depth: int
    speculation: SpeculationOptions = SpeculationOptions()


@dataclass(frozen=True, slots=True)
class RecordedChoice:
    """What was known of a choice of a resumed answer.

    block_names: of the full blocks behind those of the prompt. is_stopped: the last of its tokens ended it by
    a stop string or token. is_told: its client knew its end.
    """

    num_tokens: int
    block_names: tuple[int, ...] = ()
    is_stopped: bool = False
    is_told: bool = False


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """All of a request that scheduling depends on, nothing of what it says.

    block_names: of the full blocks of its prompt; none if it was refused. max_tokens: as asked for, None if
    left open. n: choices that are sampled for it, or told of a beam search. resumed: by choice, of an answer
    that began elsewhere; or, where is_scoring, of the continuations that are scored. scores_prompt: whether
    the prompt is scored. hands_over: as `NewRequest` has it. searches_form: whether its beams are bound to a
    form.
    """

    request_id: str
    num_prompt_tokens: int
    block_names: tuple[int, ...]
    arrival_time: float
    max_tokens: int | None
    n: int = 1
    min_tokens: int = 0
    needs_history: bool = False
    priority: int = 0
    tenant: str = ""
    bypass_prefix_cache: bool = False
    deadline: float | None = None
    resumed: tuple[RecordedChoice, ...] = ()
    max_draft_tokens: int | None = None
    beam_search: BeamSearch | None = None
    is_scoring: bool = False
    scores_prompt: bool = False
    hands_over: bool = False
    searches_form: bool = False

    @classmethod
    def of(
        cls, new: NewRequest, block_names: tuple[int, ...], resumed: tuple[RecordedChoice, ...] | None = None
    ) -> Self:
        """What is kept of a request whose full blocks have these names.

        resumed: of what is known of its answer; by default the counts alone.
        """
        params = new.params
        if resumed is None:
            resumed = tuple(RecordedChoice(len(choice.token_ids)) for choice in new.resumed)
        return cls(
            new.request_id,
            len(new.prompt_token_ids),
            block_names,
            new.arrival_time,
            params.max_tokens,
            params.best_of or params.n,
            params.min_tokens,
            params.needs_history,
            new.priority,
            new.tenant,
            new.bypass_prefix_cache,
            new.deadline,
            resumed,
            params.max_draft_tokens,
            params.beam_search,
            new.is_scoring,
            params.prompt_logprobs is not None,
            new.hands_over,
            params.beam_search is not None and params.structured_output is not None,
        )

    def stand_in(self, block_size: int) -> NewRequest:
        """The request for a replay: its blocks are equal where those of the original were."""
        return NewRequest(
            self.request_id,
            stand_ins(self.num_prompt_tokens, self.block_names, block_size),
            SamplingParams(
                n=self.n,
                max_tokens=self.max_tokens,
                min_tokens=self.min_tokens,
                presence_penalty=_HISTORY if self.needs_history else 0.0,
                max_draft_tokens=self.max_draft_tokens,
                stop_token_ids=() if self.beam_search is None else (STOP_STAND_IN,),
                beam_search=self.beam_search,
                prompt_logprobs=0 if self.scores_prompt else None,
                structured_output=_ANY_FORM if self.searches_form else None,
            ),
            seed=0,
            arrival_time=self.arrival_time,
            priority=self.priority,
            tenant=self.tenant,
            bypass_prefix_cache=self.bypass_prefix_cache,
            deadline=self.deadline,
            resumed=tuple(self._resumed_stand_in(choice, block_size) for choice in self.resumed),
            is_scoring=self.is_scoring,
            hands_over=self.hands_over,
        )

    def _resumed_stand_in(self, choice: RecordedChoice, block_size: int) -> ResumedChoice:
        names = (*self.block_names, *choice.block_names)
        tokens = stand_ins(self.num_prompt_tokens + choice.num_tokens, names, block_size)
        return ResumedChoice(tokens[self.num_prompt_tokens :], is_finished=choice.is_told)


@dataclass(frozen=True, slots=True)
class SequenceState:
    """block_names: of its full blocks, none once it is finished. Tables are empty where it holds none.

    fields: the counters of `core.request.Sequence` by name.
    """

    seq_id: int
    index: int
    num_tokens: int
    block_names: tuple[int, ...]
    table: tuple[int, ...]
    host_table: tuple[int, ...]
    fields: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class RequestState:
    """A live request.

    num_preemptions_by_kind: by Reclaim value. fields: those of `core.request.Request` by name.
    """

    request: RecordedRequest
    status: RequestStatus
    queue_entry: QueueEntry
    num_preemptions_by_kind: Mapping[str, int]
    sequences: tuple[SequenceState, ...]
    fields: Mapping[str, Scalar]
    beams: RecordedBeams | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A scheduler between two steps. requests: in order of acceptance. Hashes are those of blocks' names."""

    requests: tuple[RequestState, ...]
    scheduler: SchedulerSnapshot


@dataclass(frozen=True, slots=True)
class FlightStart:
    """Where a replay can begin. checkpoint: None for a scheduler just made."""

    policies: PolicySpecs
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class Added:
    """A request was submitted. max_tokens: in force, 0 if it was refused. refusal: the error's type."""

    now: float
    request: RecordedRequest
    max_tokens: int = 0
    refusal: str = ""
    decisions: tuple[Decision, ...] = ()
    raised: str = ""


@dataclass(frozen=True, slots=True)
class Aborted:
    """A request was ended from outside. error: the type of the reason."""

    now: float
    request_id: str
    error: str
    decisions: tuple[Decision, ...] = ()
    raised: str = ""


@dataclass(frozen=True, slots=True)
class Expired:
    """The clock moved, and ended those whose deadline passed. Noted only where either made a difference."""

    now: float
    decisions: tuple[Decision, ...] = ()
    raised: str = ""


@dataclass(frozen=True, slots=True)
class Paused:
    """A reader lags behind, or (is_paused False) reads on."""

    now: float
    request_id: str
    is_paused: bool
    decisions: tuple[Decision, ...] = ()
    raised: str = ""


@dataclass(frozen=True, slots=True)
class PoliciesSet:
    """Policies were swapped while running. policies: those that came, the others stay."""

    now: float
    policies: PolicySpecs
    decisions: tuple[Decision, ...] = ()
    raised: str = ""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A policy took too long, so that the default of its axis took over. reason: in words.

    What faults led to is no entry: a replay comes to the same.
    """

    now: float
    axis: str
    reason: str
    decisions: tuple[Decision, ...] = ()
    raised: str = ""


@dataclass(frozen=True, slots=True)
class PartialName:
    """The name of a partial block: of those of the sequence's first `num_tokens` tokens that come after the
    last full block."""

    seq_id: int
    num_tokens: int
    name: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step was decided. step_id: 0 if there was nothing to do.

    rows: for each sequence ROW_FIELDS as 32-bit numbers. raised: what came instead, or empty. partial_names:
    of the partial blocks that were looked for. found_drafts: for each sequence that drafts were found for
    DRAFT_FIELDS, likewise; as many of them as its row says are verified. on_disk: names of the blocks that
    the disk was found to hold.
    """

    now: float
    step_id: int
    rows: bytes = b""
    copies: BlockCopies = BlockCopies()
    decisions: tuple[Decision, ...] = ()
    raised: str = ""
    partial_names: tuple[PartialName, ...] = ()
    found_drafts: bytes = b""
    on_disk: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RowResult:
    """What the row-th sample of a step yielded, where that was not one token that went on.

    block_names: for each token accepted, the name of the block that it completed, or 0. is_stopped: the
    last one ended its choice by a stop string or token. has_no_text: decoding it raised, which ended its
    request. logprobs: of a beam, those of its candidates as 32-bit floats, the likeliest first. stops: places
    among them of tokens that stop.
    """

    row: int
    block_names: tuple[int, ...]
    is_stopped: bool = False
    error: str = ""
    has_no_text: bool = False
    logprobs: bytes = b""
    stops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Updated:
    """A step's results were taken. results: those unlike the most common one. partial_names: of the last
    blocks of choices that ended. beam_names: of the blocks that beams' newest tokens complete."""

    now: float
    step_id: int
    results: tuple[RowResult, ...] = ()
    decisions: tuple[Decision, ...] = ()
    raised: str = ""
    partial_names: tuple[PartialName, ...] = ()
    beam_names: tuple[PartialName, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """A step failed. error: the type of the failure."""

    now: float
    step_id: int
    error: str
    decisions: tuple[Decision, ...] = ()
    raised: str = ""


@dataclass(frozen=True, slots=True)
class Transferred:
    """Blocks were moved between the host and the disk, or could not be."""

    now: float
    ended: tuple[TransferEnd, ...]
    decisions: tuple[Decision, ...] = ()
    raised: str = ""


Entry = (
    Added
    | Aborted
    | Expired
    | Paused
    | PoliciesSet
    | Quarantined
    | Scheduled
    | Updated
    | Failed
    | Transferred
)


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """reason: why it was written. start: None if the entries reach back to no moment that a replay could
    begin at. num_dropped: entries that came before and are gone. lost: what its file lacks at the end, in
    words, if it was cut."""

    reason: str
    setting: Setting
    start: FlightStart | None
    num_dropped: int
    entries: tuple[Entry, ...]
    lost: str = ""


class RecordedError(PageturnerError):
    """Stands, in a replay, for an error of which the record holds the name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def error_name(error: BaseException | None) -> str:
    """How a record names an error: by its type; empty for none."""
    if error is None:
        return ""
    return error.name if isinstance(error, RecordedError) else type(error).__name__


def pack_rows(output: SchedulerOutput) -> bytes:
    """`Scheduled.rows` of a step."""
    flat = [
        number
        for part in output.scheduled
        for number in (
            part.seq_id & LOW,
            part.start,
            len(part.token_ids),
            len(part.block_table),
            part.block_table[-1],
        )
    ]
    return struct.pack(f"<{len(flat)}I", *flat)


def results_of(output: SchedulerOutput) -> tuple[ScoreRun | SampleRow, ...]:
    """What the results of a step come of, in their order: what is scored, then what is sampled."""
    runs = [run for part in output.scheduled for run in part.scored]
    return (*runs, *(row for part in output.scheduled for row in part.samples))


def unpack_rows(rows: bytes) -> list[tuple[int, ...]]:
    """One tuple of ROW_FIELDS for each sequence."""
    return list(struct.iter_unpack(f"<{len(ROW_FIELDS)}I", rows))


def pack_found_drafts(found: Mapping[int, tuple[int, bool]]) -> bytes:
    """`Scheduled.found_drafts` of a step."""
    flat = [number for seq_id, drafts in found.items() for number in (seq_id & LOW, *drafts)]
    return struct.pack(f"<{len(flat)}I", *flat)


def unpack_found_drafts(packed: bytes) -> dict[int, tuple[int, bool]]:
    """How many drafts were found, and whether behind a whole match, by the sequence's number of 32 bits."""
    rows = struct.iter_unpack(f"<{len(DRAFT_FIELDS)}I", packed)
    return {seq_id: (count, bool(is_whole)) for seq_id, count, is_whole in rows}
