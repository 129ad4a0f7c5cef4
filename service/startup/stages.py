"""Where the time of a start goes."""

from __future__ import annotations

from collections.abc import Callable

STARTED = "started"
"""The log's event that tells the seconds of each part, in their order."""

OnStage = Callable[[str], None]
"""Told the name of each part as it ends."""


class Stages:
    """The parts of a start, one after the other. now: seconds; started_at: on the same clock."""

    def __init__(self, now: Callable[[], float], started_at: float) -> None:
        self._now = now
        self._last = started_at
        self.seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """All since the end of the part before, or since the start, was `name`."""
        at = self._now()
        self.seconds[name] = at - self._last
        self._last = at


def unheard(name: str) -> None:
    """Where the parts of a start are of no interest."""
