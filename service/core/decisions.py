"""What the scheduler decided about a request, and who decided it.

The planner and its parts note a decision where they take one, in `SchedulerState.decisions` or in the
attempt at hand, and only while a listener is there: a step with nothing waiting and no shortage notes
nothing. Policies are named as in a configuration; what no policy decides is named in `CoreRule`. Flight
records tag decisions by the names of these classes, and so keep them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pageturner.policies.interfaces import Reclaim


class CoreRule(Enum):
    """A rule of the scheduler that decides where no policy is asked."""

    GUARDED = "guarded request"
    CLAIM = "claim"
    CAPACITY = "capacity"
    PAUSED_FIRST = "paused first"
    HOLDERS_FIRST = "waiting holders first"
    MAX_BYPASSES = "max_bypasses"
    MAX_SKIPS = "max_skips"
    BUDGET = "max_num_batched_tokens"
    TENANT_SHARE = "share_between_tenants"
    PENDING = "blocks in flight"
    WHOLE = "yields whole"
    DEADLINES = "deadlines of running requests"
    DEFAULT = "the default policy"


class GuardedReason(Enum):
    """Why a request became the one that no policy can hold back."""

    STARVED = "starved"
    HEAD_OF_RUNNING = "head of the running"
    HEAD_OF_QUEUE = "head of the queue"


@dataclass(frozen=True, slots=True)
class Admitted:
    """A waiting request runs from this step on."""

    request_id: str
    by: str
    """The admission policy, or a `CoreRule`."""
    is_first: bool
    """Whether it never ran before."""
    was_swapped: bool
    """Whether its KV came back from host memory."""
    num_cached_tokens: int
    """Tokens covered by cached blocks."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A waiting request was looked at and does not run yet."""

    request_id: str
    by: str
    """The admission policy, or a `CoreRule`."""
    num_blocks: int
    """Blocks that it needs."""
    num_available: int
    """Blocks that were left for it, num_promised of them to others that have yet to take them."""
    watermark_blocks: int = 0
    num_slots_short: int = 0
    """Sequences over max_num_seqs."""
    num_promised: int = 0


@dataclass(frozen=True, slots=True)
class AwaitsProducer:
    """A waiting request waits for blocks of its own prefix that another one is computing."""

    request_id: str
    producer: str


@dataclass(frozen=True, slots=True)
class Fetches:
    """A waiting request waits for blocks of its prefix that are read from disk."""

    request_id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Overtaken:
    """A waiting request was looked past: a later one was admitted in this step."""

    request_id: str
    by: str


@dataclass(frozen=True, slots=True)
class AdmissionsHeld:
    """The rest of the queue was not looked at."""

    by: str
    after: str
    """The last request that was looked at; empty for none."""
    queue: str
    """The policy that ordered the queue."""
    batch: str
    """The policy that split the step's budget."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request gave up blocks."""

    request_id: str
    claimant: str
    chosen_by: str
    """The victim policy, or a `CoreRule`."""
    rank: int
    """Its place in the victim policy's order, from 1, of num_candidates."""
    num_candidates: int
    how: Reclaim
    how_by: str
    """The reclaim policy, or a `CoreRule` where there was no choice."""
    num_blocks_short: int
    """Blocks that the claimant lacked."""
    num_slots_short: int
    """Sequence slots that the claimant lacked."""


@dataclass(frozen=True, slots=True)
class Stalled:
    """A running request lacks blocks for its next token and no request is preempted for it.

    awaits_pending: enough of them fall free when the step in flight ends.
    """

    request_id: str
    num_blocks_short: int
    awaits_pending: bool


@dataclass(frozen=True, slots=True)
class GuardedChosen:
    """From now on no policy can hold this request back."""

    request_id: str
    reason: GuardedReason


@dataclass(frozen=True, slots=True)
class PolicyFault:
    """A policy answered nonsense so many times, and the default answered in its place."""

    axis: str
    policy: str
    count: int


@dataclass(frozen=True, slots=True)
class PolicyReplaced:
    """Another policy is in force: the operator swapped it, or it was quarantined for its faults."""

    axis: str
    policy: str
    successor: str


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """One choice is done. reason: a FinishReason's value."""

    request_id: str
    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The terminal event. error: name of its error type, empty if all went well."""

    request_id: str
    error: str
    num_output_tokens: int
    num_cached_prompt_tokens: int
    queue_seconds: float
    num_preemptions: int


Decision = (
    Admitted
    | Refused
    | AwaitsProducer
    | Fetches
    | Overtaken
    | AdmissionsHeld
    | Preempted
    | Stalled
    | GuardedChosen
    | PolicyFault
    | PolicyReplaced
    | ChoiceEnded
    | Ended
)
