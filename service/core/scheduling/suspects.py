"""Finds the request that makes steps fail, by halves.

After a failed step only the first group runs, alone. If it fails again it is split further; once every
member has got as far as sampling a token in a step that succeeded, the next group has its turn. The one
that fails alone is the poison.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable


class Suspects:
    """Members are `Request.order` numbers."""

    def __init__(self) -> None:
        self._groups: deque[set[int]] = deque()

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def running_alone(self) -> frozenset[int] | None:
        """Who may run now; None if nobody is under suspicion."""
        return frozenset(self._groups[0]) if self._groups else None

    def snapshot(self) -> tuple[tuple[int, ...], ...]:
        """The groups in the order of their turns."""
        return tuple(tuple(sorted(group)) for group in self._groups)

    def restore(self, groups: Iterable[Iterable[int]]) -> None:
        """Take the place of one whose `snapshot` this was."""
        self._groups = deque(set(group) for group in groups)

    def failed(self, members: Iterable[int]) -> int | None:
        """A step with these members failed. Returns the culprit if there was only one."""
        failed = sorted(members)
        if self._groups:
            self._groups[0].difference_update(failed)
        if len(failed) == 1:
            self._drop_empty()
            return failed[0]
        half = len(failed) // 2
        for group in (failed[half:], failed[:half]):
            if group:
                self._groups.appendleft(set(group))
        self._drop_empty()
        return None

    def cleared(self, order: int) -> None:
        """This member sampled a token in a step that succeeded."""
        if self._groups:
            self._groups[0].discard(order)
            self._drop_empty()

    def keep(self, able: Collection[int]) -> None:
        """Forget members that ended or cannot run at present: they would hold up everybody."""
        for group in self._groups:
            group.intersection_update(able)
        self._drop_empty()

    def _drop_empty(self) -> None:
        while self._groups and not self._groups[0]:
            self._groups.popleft()
