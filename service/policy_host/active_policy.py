"""One axis: the policy that was chosen, the default behind it, and when the one gives way to the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pageturner.service.policy_host.answers import WANTED
from pageturner.service.policy_host.calls import CallWatch, PolicyCaller, PolicyCallFailed
from pageturner.service.policy_host.reports import FaultNote
from pageturner.service.policy_host.snapshot import ActivePolicyState

NUM_RECENT_ANSWERS = 32
_RECENT = (1 << NUM_RECENT_ANSWERS) - 1

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FaultLimits:
    """When a policy is quarantined: after max_faults bad answers in all, or once so many of its last
    NUM_RECENT_ANSWERS were bad as make max_share of them (8 at 0.25), the first answers included.

    So one that always fails gives way after 8 questions, however seldom it is asked; and one that fails
    now and then, after max_faults.
    """

    max_faults: int = 100
    max_share: float = 0.25


class ActivePolicy:
    """Answers every question of its axis, whatever the chosen policy does.

    default: answers where the chosen one fails; trusted. on_fault: told of each bad answer, with a note for
    the log of the first, second, fourth, eighth, ..., so that one that always fails does not flood it.
    on_quarantine: told once.
    """

    def __init__(
        self,
        axis: str,
        chosen: object,
        default: PolicyCaller,
        watch: CallWatch,
        limits: FaultLimits,
        *,
        on_fault: Callable[[str, FaultNote | None], None],
        on_quarantine: Callable[[str], None],
    ) -> None:
        self.axis = axis
        self.num_faults = 0
        self.last_fault = ""
        self.quarantine_reason = ""
        self._num_offences = 0
        self._recent = 0  # a bit for each of the last answers, the newest lowest; set where it was bad
        self._limits = limits
        self._on_fault = on_fault
        self._on_quarantine = on_quarantine
        self.default = default
        self.chosen = PolicyCaller(axis, chosen, watch, self._offence)
        self.chosen.start_memory()

    @property
    def is_quarantined(self) -> bool:
        """Whether the default of the axis decides instead."""
        return bool(self.quarantine_reason)

    @property
    def in_force(self) -> PolicyCaller:
        """The policy that is asked: this one, or in quarantine its axis's default."""
        return self.default if self.is_quarantined else self.chosen

    def snapshot(self) -> ActivePolicyState:
        """Its standing at this moment; a memory is immutable, so it is kept as it is."""
        return ActivePolicyState(
            self.num_faults,
            self._num_offences,
            self._recent,
            self.quarantine_reason,
            self.chosen.state,
            self.default.state,
        )

    def restore(self, state: ActivePolicyState) -> None:
        """Take the standing of one that has the same policies."""
        self.num_faults = state.num_faults
        self._num_offences = state.num_offences
        self._recent = state.recent
        self.quarantine_reason = state.quarantine_reason
        self.chosen.state = state.chosen_memory
        self.default.state = state.default_memory

    def ask(self, parse: Callable[[Any], _T], *arguments: object) -> _T:
        """The policy's answer as `parse` makes it of what was said, else the default's.

        parse: checks and converts; raises BadAnswer, or anything, for what cannot be followed.
        """
        if not self.is_quarantined:
            try:
                answer = self.chosen.ask(parse, *arguments)
            except PolicyCallFailed as fault:
                self._offence(fault)
            else:
                if self._recent:
                    self._recent = self._recent << 1 & _RECENT
                return answer
        return self.default.ask(parse, *arguments)

    def note_fault(self, what: str) -> None:
        """Count an answer that the moment made impossible (no host room): no reason for quarantine."""
        self.num_faults += 1
        self.last_fault = what
        self._on_fault(self.axis, fault_note(self.axis, self.chosen, self.num_faults, what))

    def quarantine(self, reason: str) -> None:
        """The default decides from now on. Nothing happens if it does already."""
        if not self.is_quarantined:
            self.quarantine_reason = reason
            self._on_quarantine(self.axis)

    def _offence(self, fault: PolicyCallFailed) -> None:
        self.num_faults += 1
        self.last_fault = fault.what
        self._num_offences += 1
        self._recent = (self._recent << 1 | 1) & _RECENT
        note = fault_note(self.axis, self.chosen, self.num_faults, fault.what, fault)
        self._on_fault(self.axis, note)
        num_recent = self._recent.bit_count()
        if self._num_offences >= self._limits.max_faults:
            self.quarantine(f"{self._num_offences} bad answers")
        elif num_recent >= self._limits.max_share * NUM_RECENT_ANSWERS:
            self.quarantine(f"{num_recent} of its last {NUM_RECENT_ANSWERS} answers were bad")


def fault_note(
    axis: str,
    caller: PolicyCaller,
    num_faults: int,
    what: str,
    fault: PolicyCallFailed | None = None,
    *,
    is_shadow: bool = False,
) -> FaultNote | None:
    """The num_faults-th fault of a policy for the log; None unless that is a power of two."""
    is_due = num_faults.bit_count() == 1
    told = fault.traceback() if is_due and fault is not None else ""
    if fault is not None:
        fault.release()
    if not is_due:
        return None
    return FaultNote(axis, caller.spec.name, is_shadow, WANTED[axis], what, num_faults, told)
