"""What enters the step loop and what leaves it: frozen values. All can be pickled but ChangePolicies, whose
policies are objects of any author's class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pageturner.service.core.inspection import SchedulerInspection
from pageturner.service.core.outputs import Event
from pageturner.service.core.request import NewRequest
from pageturner.service.engine.api import AcceptedEvent
from pageturner.service.errors import PageturnerError
from pageturner.service.policy_host.reports import PoliciesInfo


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue a request; answered by AcceptedEvent or SubmitRefused."""

    request: NewRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request with this error. Nothing happens if it has ended."""

    request_id: str
    error: PageturnerError


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop scheduling a request whose reader lags; cancel it unless resumed by `until` (our clock)."""

    request_id: str
    until: float


@dataclass(frozen=True, slots=True)
class Resume:
    """The reader has caught up."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ChangePolicies:
    """Put other policies in force; answered by PoliciesChanged or PolicyChangeRefused, same change_id.

    policies, shadows: by axis; what is left out stays, and None ends a shadow. expected_revision: refuse
    unless it is the one in force.
    """

    change_id: int
    policies: Mapping[str, object]
    shadows: Mapping[str, object | None]
    expected_revision: int | None = None


@dataclass(frozen=True, slots=True)
class Inspect:
    """Tell what lives between two steps; answered by Inspected. By itself it makes no step."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Leave the loop. Requests that still run are not heard of again: abort them first."""


@dataclass(frozen=True, slots=True)
class SubmitRefused:
    """The request was not queued."""

    request_id: str
    error: PageturnerError


@dataclass(frozen=True, slots=True)
class PoliciesChanged:
    """What was in force before and what is now."""

    change_id: int
    old: PoliciesInfo
    new: PoliciesInfo


@dataclass(frozen=True, slots=True)
class PolicyChangeRefused:
    """Nothing was changed."""

    change_id: int
    error: PageturnerError


@dataclass(frozen=True, slots=True)
class Inspected:
    """What lived at `taken_at`, on our clock."""

    scheduler: SchedulerInspection
    taken_at: float


Command = Submit | Abort | Pause | Resume | ChangePolicies | Inspect | Shutdown
PoliciesAnswer = PoliciesChanged | PolicyChangeRefused
EngineOutput = AcceptedEvent | SubmitRefused | PoliciesAnswer | Inspected | Event
