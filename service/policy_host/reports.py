"""What is told of policies outside of the core: frozen values, for the engine, the wire and the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pageturner.policies.spec import PolicySpec


@dataclass(frozen=True, slots=True)
class Disagreement:
    """What the policy in force and its shadow said of one subject (a request id, a block), in words."""

    axis: str
    subject: str
    obeyed: str
    shadow: str


@dataclass(frozen=True, slots=True)
class ShadowInfo:
    """A policy that is asked and not obeyed.

    num_compared: answers held against those of the policy in force; samples: the last of the
    num_disagreements. num_faults, last_fault: its bad answers, which are not compared.
    seconds, step_seconds: as of `PolicyInfo`. is_stopped: it took too long, and is asked no more.
    """

    name: str
    options: Mapping[str, object]
    num_compared: int
    num_disagreements: int
    samples: tuple[Disagreement, ...]
    num_faults: int
    last_fault: str
    seconds: float = field(default=0.0, compare=False)
    step_seconds: float = field(default=0.0, compare=False)
    is_stopped: bool = False


@dataclass(frozen=True, slots=True)
class PolicyInfo:
    """One axis: the policy that was set, by name and options, and the names of those built in.

    is_quarantined, quarantine_reason: it failed too often or took too long, and the axis's default decides
    instead. num_faults, last_fault: its bad answers since it was set, the last one in words.
    num_calls, seconds: how often it was called since it was set, and how long that took in all.
    step_seconds: how long it took a step, on average over the last steps.
    asking_seconds: for how long the call under way has lasted; 0 where there is none. These four are
    measurements:
    reports that differ in nothing else are equal.
    """

    axis: str
    name: str
    options: Mapping[str, object]
    available: tuple[str, ...]
    is_quarantined: bool = False
    num_faults: int = 0
    last_fault: str = ""
    shadow: ShadowInfo | None = None
    quarantine_reason: str = ""
    num_calls: int = field(default=0, compare=False)
    seconds: float = field(default=0.0, compare=False)
    step_seconds: float = field(default=0.0, compare=False)
    asking_seconds: float = field(default=0.0, compare=False)

    @property
    def spec(self) -> PolicySpec:
        """The policy as it is set."""
        return PolicySpec(self.name, self.options)


@dataclass(frozen=True, slots=True)
class PoliciesInfo:
    """All axes at one moment. revision: raised whenever a policy or a shadow comes or goes."""

    revision: int
    axes: tuple[PolicyInfo, ...]


@dataclass(frozen=True, slots=True)
class FaultNote:
    """One bad answer, for the log. wanted: what would have been right; what: what came instead.

    num_faults: the policy's bad answers so far; not each is told of, see `host.PolicyHost.take_faults`.
    traceback: where it was raised, if it was.
    """

    axis: str
    policy: str
    is_shadow: bool
    wanted: str
    what: str
    num_faults: int
    traceback: str


@dataclass(frozen=True, slots=True)
class OverBudget:
    """A policy that took longer than it may. reason: in words."""

    axis: str
    reason: str


@dataclass(frozen=True, slots=True)
class Asking:
    """The call of a policy that is under way. seconds: how long it has lasted."""

    axis: str
    policy: str
    seconds: float
