"""A policy that is asked beside the one in force and not obeyed, so that a change can be watched first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

from pageturner.service.policy_host.active_policy import fault_note
from pageturner.service.policy_host.calls import CallWatch, PolicyCaller, PolicyCallFailed
from pageturner.service.policy_host.reports import Disagreement, FaultNote, ShadowInfo

NUM_SAMPLES = 8
"""How many of the last disagreements are kept."""


class Shadow:
    """Compares choices as they are, and ranks (queue keys, eviction scores) by pairs.

    A rank means nothing beside another policy's, so a pair is compared: whether both policies put the
    subject before or after the one that they ranked last. on_fault: given the notes for the log.
    """

    def __init__(
        self, axis: str, policy: object, watch: CallWatch, on_fault: Callable[[FaultNote], None]
    ) -> None:
        self._axis = axis
        self._on_fault = on_fault
        self._num_compared = 0
        self._num_disagreements = 0
        self._num_faults = 0
        self._last_fault = ""
        self._samples: deque[Disagreement] = deque(maxlen=NUM_SAMPLES)
        self._last_pair: tuple[Any, Any] | None = None
        self.is_stopped = False
        self.caller = PolicyCaller(axis, policy, watch, self._fault)
        self.caller.start_memory()

    def compare(
        self, subject: str, obeyed: object, parse: Callable[[Any], Any], arguments: tuple[object, ...]
    ) -> None:
        """Ask the shadow what was just answered with `obeyed`. parse: checks an answer, as for the other."""
        said = self._ask(parse, arguments)
        if said is None:
            return
        self._num_compared += 1
        if said != obeyed:
            self._disagree(subject, _words(obeyed), _words(said))

    def compare_rank(
        self, subject: str, obeyed: Any, parse: Callable[[Any], Any], arguments: tuple[object, ...]
    ) -> None:
        """As `compare`, for answers that only order their subjects; `parse` makes them comparable."""
        said = self._ask(parse, arguments)
        if said is None:
            return
        last, self._last_pair = self._last_pair, (obeyed, said)
        if last is None:
            return
        self._num_compared += 1
        one, other = _side(obeyed, last[0]), _side(said, last[1])
        if one != other:
            self._disagree(subject, one, other)

    def forget_ranks(self) -> None:
        """What was ranked before is no longer comparable: another policy is obeyed, or time has passed."""
        self._last_pair = None

    def stop(self, reason: str) -> None:
        """Ask it no more."""
        self.is_stopped = True
        self._last_fault = reason

    def report(self) -> ShadowInfo:
        return ShadowInfo(
            self.caller.spec.name,
            self.caller.spec.options,
            self._num_compared,
            self._num_disagreements,
            tuple(self._samples),
            self._num_faults,
            self._last_fault,
            self.caller.times.seconds,
            self.caller.times.step_seconds,
            self.is_stopped,
        )

    def _ask(self, parse: Callable[[Any], Any], arguments: tuple[object, ...]) -> Any:
        if self.is_stopped:
            return None
        try:
            return self.caller.ask(parse, *arguments)
        except PolicyCallFailed as fault:
            self._fault(fault)
            return None

    def _fault(self, fault: PolicyCallFailed) -> None:
        self._num_faults += 1
        self._last_fault = fault.what
        note = fault_note(self._axis, self.caller, self._num_faults, fault.what, fault, is_shadow=True)
        if note is not None:
            self._on_fault(note)

    def _disagree(self, subject: str, obeyed: str, shadow: str) -> None:
        self._num_disagreements += 1
        self._samples.append(Disagreement(self._axis, subject, obeyed, shadow))


def _words(choice: object) -> str:
    return str(choice.value) if isinstance(choice, Enum) else str(choice)


def _side(rank: Any, other: Any) -> str:
    if rank == other:
        return "level with the one before"
    return "before the one before" if rank < other else "after the one before"
