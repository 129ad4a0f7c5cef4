"""A policy that is asked beside the one in force and not obeyed, so that a change can be watched first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pageturner.service.policy_host.caller import PolicyCaller, raised

NUM_SAMPLES = 8
"""How many of the last disagreements are kept."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """What the policy in force and its shadow said of one subject (a request id, a block), in words."""

    axis: str
    subject: str
    obeyed: str
    shadow: str


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """policy: the shadow. num_asked: answers that could be compared; num_disagreements: those that differed.

    samples: the last of these. num_faults, last_fault: answers of the shadow that could not have been
    followed; they are not compared.
    """

    policy: object
    num_asked: int
    num_disagreements: int
    num_faults: int
    last_fault: str
    samples: tuple[Disagreement, ...]


class Shadow:
    """Compares choices as they are, and ranks (queue keys, eviction scores) by pairs.

    A rank means nothing beside another policy's, so a pair is compared: whether both policies put the
    subject before or after the one that they ranked last.
    """

    def __init__(self, axis: str, policy: object) -> None:
        self._axis = axis
        self.num_asked = 0
        self.num_disagreements = 0
        self.num_faults = 0
        self.last_fault = ""
        self._samples: deque[Disagreement] = deque(maxlen=NUM_SAMPLES)
        self._last_pair: tuple[Any, Any] | None = None
        self.caller = PolicyCaller(axis, policy, self._fault)

    def compare(
        self, subject: str, obeyed: object, parse: Callable[[Any], Any], arguments: tuple[object, ...]
    ) -> None:
        """Ask the shadow what was just answered with `obeyed`. parse: checks an answer, as for the other."""
        said = self._ask(parse, arguments)
        if said is None:
            return
        self.num_asked += 1
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
        self.num_asked += 1
        one, other = _side(obeyed, last[0]), _side(said, last[1])
        if one != other:
            self._disagree(subject, one, other)

    def forget_ranks(self) -> None:
        """What was ranked before is no longer comparable: another policy is obeyed, or time has passed."""
        self._last_pair = None

    def report(self) -> ShadowReport:
        return ShadowReport(
            self.caller.policy,
            self.num_asked,
            self.num_disagreements,
            self.num_faults,
            self.last_fault,
            tuple(self._samples),
        )

    def _ask(self, parse: Callable[[Any], Any], arguments: tuple[object, ...]) -> Any:
        try:
            return parse(self.caller.ask(*arguments))
        except Exception as error:
            self._fault(raised(error))
            return None

    def _fault(self, what: str) -> None:
        self.num_faults += 1
        self.last_fault = what

    def _disagree(self, subject: str, obeyed: str, shadow: str) -> None:
        self.num_disagreements += 1
        self._samples.append(Disagreement(self._axis, subject, obeyed, shadow))


def _words(choice: object) -> str:
    return str(choice.value) if isinstance(choice, Enum) else str(choice)


def _side(rank: Any, other: Any) -> str:
    if rank == other:
        return "level with the one before"
    return "before the one before" if rank < other else "after the one before"
