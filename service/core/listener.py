"""Who listens to a scheduler: told of every call that may change it, before and after, in their order.

What listens neither decides nor changes anything, and must not raise. With no listener a call costs one test
of an empty tuple more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from pageturner.policies.interfaces import PolicySet
from pageturner.service.core.decisions import Decision
from pageturner.service.core.memory.transfers import TransferEnd
from pageturner.service.core.outputs import Acceptance, Event, SampledSequence, SchedulerOutput
from pageturner.service.core.request import NewRequest
from pageturner.service.errors import PageturnerError


@dataclass(frozen=True, slots=True)
class AddRequest:
    """`Scheduler.add_request`, answered by an Acceptance."""

    new: NewRequest


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """`Scheduler.abort_request`, answered by events."""

    request_id: str
    error: PageturnerError


@dataclass(frozen=True, slots=True)
class Expire:
    """`Scheduler.expire`, answered by events."""

    now: float


@dataclass(frozen=True, slots=True)
class PauseRequest:
    """`Scheduler.pause_request`."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """`Scheduler.resume_request`."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SetPolicies:
    """`Scheduler.set_policies`."""

    policies: PolicySet
    now: float
    shadows: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Quarantine:
    """`Scheduler.quarantine`."""

    axis: str
    reason: str
    now: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """`Scheduler.schedule`, answered by the step."""

    now: float


@dataclass(frozen=True, slots=True)
class Update:
    """`Scheduler.update`, answered by events."""

    output: SchedulerOutput
    sampled: tuple[SampledSequence, ...]
    now: float


@dataclass(frozen=True, slots=True)
class FailStep:
    """`Scheduler.fail_step`, answered by events."""

    output: SchedulerOutput
    error: Exception
    now: float


@dataclass(frozen=True, slots=True)
class EndTransfers:
    """`Scheduler.end_transfers`."""

    ended: tuple[TransferEnd, ...]
    now: float


Call: TypeAlias = (
    AddRequest
    | AbortRequest
    | Expire
    | PauseRequest
    | ResumeRequest
    | SetPolicies
    | Quarantine
    | Schedule
    | Update
    | FailStep
    | EndTransfers
)
Answer: TypeAlias = Acceptance | SchedulerOutput | tuple[Event, ...] | None


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What came of a call: its answer, or what it raised. decisions: what was decided meanwhile, in order."""

    answer: Answer = None
    error: Exception | None = None
    decisions: tuple[Decision, ...] = ()


class SchedulerListener(Protocol):
    """Hears one scheduler, on the thread that owns it."""

    def before(self, call: Call) -> None:
        """Nothing has happened yet: the state is that between two calls."""
        ...

    def after(self, call: Call, outcome: CallOutcome) -> None:
        """It is done, or was refused, or failed."""
        ...
