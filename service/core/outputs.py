"""The frozen values that cross the core's borders.

Down to the model goes a `SchedulerOutput`; back comes a `SampledSequence` for each row that was
sampled; out to the clients go events. All are plain data, so that the model may run in another
process and the engine in another thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from pageturner.service.core.sample_row import SampledToken as SampledToken
from pageturner.service.core.sample_row import SampleRow as SampleRow
from pageturner.service.core.sample_row import ScoreRun as ScoreRun
from pageturner.service.core.sample_row import TokenLogprob as TokenLogprob
from pageturner.service.core.sample_row import record as record
from pageturner.service.core.stats import SchedulerStats as SchedulerStats
from pageturner.service.core.usage import RequestTimings as RequestTimings
from pageturner.service.core.usage import Usage as Usage
from pageturner.service.errors import PageturnerError

if TYPE_CHECKING:
    from pageturner.service.core.request import NewRequest

UNKNOWN_TOKEN = -1
"""Stands for the token that the previous, unfinished step samples for this sequence (depth 1)."""


NO_BLOCK = -1
"""In a table, in the place of a block that was given back behind a sliding window: at its beginning alone."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one whole block, all layers: source and destination ids, each in its own pool."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """The block traffic of one step, in the order in which it must happen."""

    clears: tuple[int, ...] = ()
    """Device blocks to be zeroed, before everything else (KV of a request that went non-finite)."""
    swap_outs: tuple[BlockCopy, ...] = ()
    """Copies from device to host blocks."""
    swap_ins: tuple[BlockCopy, ...] = ()
    """Copies from host to device blocks."""
    copies: tuple[BlockCopy, ...] = ()
    """Device to device (copy-on-write), with simultaneous-copy semantics: every source is read before any
    destination is written."""

    def __bool__(self) -> bool:
        return bool(self.clears or self.swap_outs or self.swap_ins or self.copies)


@record
class ScheduledSequence:
    """One sequence's part in a step.

    token_ids are computed at positions start, start + 1, ...; the KV of positions below write_start
    is in the cache already and must not be written again (slot -1). block_table covers
    start + len(token_ids) tokens. samples: empty for an unfinished chunk, n rows at a fork; each draws the
    token of position `end`, the counter of its random stream. adapter: as `NewRequest` has it. num_drafts: so
    many of the tokens, the last ones, are guesses; the one sample row draws a token behind the token before
    them, and behind each. scored: known tokens whose log-probabilities are wanted, by rows of this part: one
    run, or at a fork one of a token each, all by the last row.
    """

    seq_id: int
    request_id: str
    epoch: int
    token_ids: tuple[int, ...]
    start: int
    write_start: int
    block_table: tuple[int, ...]
    samples: tuple[SampleRow, ...]
    adapter: str = ""
    num_drafts: int = 0
    scored: tuple[ScoreRun, ...] = ()

    @property
    def end(self) -> int:
        """Position behind the last token computed."""
        return self.start + len(self.token_ids)

    @property
    def scored_rows(self) -> range:
        """Positions whose logits score known tokens; none of them is sampled from."""
        if not self.scored:
            return range(0)
        run = self.scored[0]
        return range(run.start, run.start + len(run.token_ids))


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step, ready to be carried out."""

    step_id: int
    scheduled: tuple[ScheduledSequence, ...]
    block_copies: BlockCopies = field(default_factory=BlockCopies)

    @property
    def num_tokens(self) -> int:
        """Rows of the step: tokens of all sequences."""
        return sum(len(sequence.token_ids) for sequence in self.scheduled)

    def __bool__(self) -> bool:
        return bool(self.scheduled or self.block_copies)


@record
class SampledSequence:
    """What one SampleRow yielded: a token, behind drafts that came true, or the reason there is none.

    That of a beam is the likeliest one, whose top_logprobs are the candidates to continue the beam with.
    scores: in place of tokens, what one ScoreRun yielded: its tokens, each with its log-probability.
    """

    seq_id: int
    epoch: int
    tokens: tuple[SampledToken, ...]
    error: PageturnerError | None = None
    scores: tuple[SampledToken, ...] = ()


class FinishReason(Enum):
    """Why one choice ended. UNSPECIFIED never leaves the service."""

    UNSPECIFIED = "unspecified"
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@record
class TokenEvent:
    """New tokens of one choice and the text they release (text may lag behind tokens)."""

    request_id: str
    index: int
    tokens: tuple[SampledToken, ...]
    text: str


@dataclass(frozen=True, slots=True)
class ScoredTokensEvent:
    """Log-probabilities of known tokens, in order: of the prompt's, or of continuation `index`.

    start: position of the first of them in the prompt, or in the continuation. A prompt's all come before the
    first sampled token, and none is of position 0, which follows nothing.
    """

    request_id: str
    index: int | None
    start: int
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class ChoiceFinishedEvent:
    """One choice ended. matched: the stop string or stop token id that ended it, if one did. score: of an
    answer of a beam search, as `BeamSearch.length_penalty` has it. cumulative_logprob: sum over its tokens,
    where these have log-probabilities and were all sampled here."""

    request_id: str
    index: int
    reason: FinishReason
    matched: str | int | None = None
    score: float | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The terminal event of a request, sent exactly once. error is None when all went well."""

    request_id: str
    usage: Usage
    timings: RequestTimings
    error: PageturnerError | None = None
    policies: Mapping[str, str] = field(default_factory=dict)
    """Names of the policies in force at its end, by axis."""
    policies_changed: bool = False
    """Whether policies were changed while it lived."""


Event = TokenEvent | ScoredTokensEvent | ChoiceFinishedEvent | FinishedEvent


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What comes of adding a request.

    max_tokens: in force for each choice. events: what can be told at once of an answer that is resumed: text
    that its client lacks, and choices that its tokens end.
    """

    max_tokens: int
    events: tuple[Event, ...] = ()


@record
class TextDelta:
    """Text that may be shown now, and the stop string that was completed, if one was."""

    text: str
    matched_stop: str | None = None


class StopCondition(Protocol):
    """Turns tokens into text as they come, and finds stop strings. Implemented by the engine.

    The core calls `start` when a sequence is accepted, `append` for each accepted token in order, then
    `finish` once (flush what was held back), after an abort too. What any of them raises ends that request
    with TextFailed; `finish` is called then as well, has to forget the sequence, and may raise again.
    """

    def start(self, seq_id: int, request: NewRequest) -> None: ...

    def append(self, seq_id: int, token_id: int, *, may_stop: bool, is_stop_token: bool) -> TextDelta:
        """may_stop: False below min_tokens. is_stop_token: eos or a stop id; shown only if include_stop."""
        ...

    def finish(self, seq_id: int) -> str: ...
