"""A policy together with the memory that the core keeps for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pageturner.policies.events import PolicyEvent
from pageturner.policies.interfaces import Migrating, is_stateful

QUESTIONS: Mapping[str, str] = {
    "queue": "key",
    "admission": "decide",
    "batch": "split",
    "victim": "rank",
    "reclaim": "choose",
    "eviction": "score",
}
"""The method that answers for each axis."""


class BadAnswer(Exception):
    """An answer that cannot be followed."""

    def __init__(self, answer: object) -> None:
        super().__init__(f"answered {_shown(answer)}")


class PolicyCaller:
    """Asks one policy. A stateful one is passed its state, which only `fold` and `inherit` change.

    on_fault: told, in words, of a memory that raised; the state of before is kept then.
    """

    __slots__ = ("_answer", "_fold", "_on_fault", "policy", "state")

    def __init__(self, axis: str, policy: Any, on_fault: Callable[[str], None]) -> None:
        self.policy = policy
        self._on_fault = on_fault
        self._answer = getattr(policy, QUESTIONS[axis])
        self._fold: Callable[[Any, PolicyEvent], Any] | None = None
        self.state: Any = None
        if is_stateful(policy):
            try:
                self.state, self._fold = policy.initial_state(), policy.fold
            except Exception as error:
                on_fault(raised(error))  # it answers as one that has seen nothing

    @property
    def has_memory(self) -> bool:
        return self._fold is not None

    def ask(self, *arguments: object) -> Any:
        """Its answer, unchecked; raises whatever the policy raises."""
        if self._fold is None:
            return self._answer(*arguments)
        return self._answer(*arguments, state=self.state)

    def fold(self, event: PolicyEvent) -> None:
        if self._fold is None:
            return
        try:
            self.state = self._fold(self.state, event)
        except Exception as error:
            self._on_fault(raised(error))

    def inherit(self, predecessor: PolicyCaller, history: Iterable[PolicyEvent]) -> None:
        """Take over from the policy before it, by the rule of `policies.interfaces.Stateful`.

        history: the live requests, told as events to a memory that begins anew.
        """
        if self._fold is None:
            return
        if predecessor.has_memory:
            try:
                if self.policy == predecessor.policy:
                    self.state = predecessor.state
                    return
                if isinstance(self.policy, Migrating):
                    migrated = self.policy.migrate(predecessor.state)
                    if migrated is not None:
                        self.state = migrated
                        return
            except Exception as error:
                self._on_fault(raised(error))
        for event in history:
            self.fold(event)


def raised(error: Exception) -> str:
    """A fault in words, for an operator."""
    return str(error) if isinstance(error, BadAnswer) else f"raised {_shown(error)}"


def _shown(answer: object) -> str:
    """An answer in words, of bounded length; even its repr is not to be trusted."""
    try:
        return repr(answer)[:200]
    except Exception:
        return f"a {type(answer).__name__} that has no repr"
