"""What a simulated server tells of its requests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from pageturner.service.errors import PageturnerError


@dataclass(slots=True)
class SimulatedRequest:
    """What became of one request. Times are virtual seconds; None where it did not happen.

    token_times: of every token of its first choice.
    """

    arrived_at: float
    tenant: str
    num_prompt_tokens: int
    priority: int = 0
    ended_at: float | None = None
    token_times: array[float] = field(default_factory=lambda: array("d"))
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: PageturnerError | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a fleet is told of a request that ended. num_cached_tokens: of its prompt."""

    num_output_tokens: int
    num_cached_tokens: int
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """Requests by their index in the workload: whose first token came, and who ended, in that order."""

    started: Sequence[int] = ()
    ended: Sequence[int] = ()


NOTHING = Progress()
