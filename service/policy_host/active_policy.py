"""One axis: the policy that was chosen, and the default behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pageturner.service.policy_host.caller import PolicyCaller, raised
from pageturner.service.policy_host.snapshot import ActivePolicyState

_T = TypeVar("_T")


class ActivePolicy:
    """Answers every question of its axis, whatever the chosen policy does.

    default: answers where the chosen one fails; trusted. max_faults: after so many bad answers the
    chosen one is not asked any more. on_fault: told of each; on_quarantine: told once.
    """

    def __init__(
        self,
        axis: str,
        chosen: object,
        default: PolicyCaller,
        *,
        max_faults: int,
        on_fault: Callable[[str], None],
        on_quarantine: Callable[[str], None],
    ) -> None:
        self.axis = axis
        self.num_faults = 0
        self.last_fault = ""
        self.is_quarantined = False
        self._num_offences = 0
        self._max_faults = max_faults
        self._on_fault = on_fault
        self._on_quarantine = on_quarantine
        self.default = default
        self.chosen = PolicyCaller(axis, chosen, self._offence)

    @property
    def in_force(self) -> PolicyCaller:
        return self.default if self.is_quarantined else self.chosen

    def snapshot(self) -> ActivePolicyState:
        """Its standing at this moment; a memory is immutable, so it is kept as it is."""
        return ActivePolicyState(
            self.num_faults,
            self._num_offences,
            self.is_quarantined,
            self.chosen.state,
            self.default.state,
        )

    def restore(self, state: ActivePolicyState) -> None:
        """Take the standing of one that has the same policies."""
        self.num_faults = state.num_faults
        self._num_offences = state.num_offences
        self.is_quarantined = state.is_quarantined
        self.chosen.state = state.chosen_memory
        self.default.state = state.default_memory

    def ask(self, parse: Callable[[Any], _T], *arguments: object) -> _T:
        """The policy's answer as `parse` makes it of what was said, else the default's.

        parse: checks and converts; raises BadAnswer, or anything, for what cannot be followed.
        """
        if not self.is_quarantined:
            try:
                return parse(self.chosen.ask(*arguments))
            except Exception as error:
                self._offence(raised(error))
        return parse(self.default.ask(*arguments))

    def note_fault(self, what: str) -> None:
        """Count an answer that the moment made impossible (no host room): no reason for quarantine."""
        self.num_faults += 1
        self.last_fault = what
        self._on_fault(self.axis)

    def _offence(self, what: str) -> None:
        self.note_fault(what)
        self._num_offences += 1
        if self._num_offences >= self._max_faults and not self.is_quarantined:
            self.is_quarantined = True
            self._on_quarantine(self.axis)
