"""What was asked of the service, and what became of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Counts of one run. problems: each a sentence; a run without any is a good one.

    An accepted request whose client was there to see its end and saw none, or two, is lost.
    """

    num_requests: int = 0
    num_accepted: int = 0
    num_lost: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    _num_ids: int = 0

    def new_id(self, purpose: str) -> str:
        """An id that no other request has."""
        self._num_ids += 1
        return f"{purpose}-{self._num_ids}"

    def problem(self, text: str) -> None:
        """Something that must not be."""
        self.problems.append(text)

    def lost(self, text: str) -> None:
        """An accepted request without exactly one end."""
        self.num_lost += 1
        self.problem(text)
