"""How fast something happens of late."""

from __future__ import annotations

import math

TIME_CONSTANT = 30.0
"""Seconds in which what was seen loses all but 1/e of its weight."""


class RateMeter:
    """An exponentially weighted count a second, unbiased while it is young."""

    def __init__(self, now: float) -> None:
        self._made_at = self._at = now
        self._weight = 0.0

    def add(self, count: float, now: float) -> None:
        """It happened so many times, now."""
        self._weight = self._decayed(now) + count
        self._at = now

    def per_second(self, now: float) -> float:
        """The rate of late; 0 if it never happened."""
        age = max(now - self._made_at, 1.0)
        return self._decayed(now) / (TIME_CONSTANT * -math.expm1(-age / TIME_CONSTANT))

    def seconds_for(self, count: float, now: float) -> float | None:
        """How long so many take at this rate; None where there is none."""
        rate = self.per_second(now)
        return count / rate if rate > 0 else None

    def _decayed(self, now: float) -> float:
        return self._weight * math.exp(-max(0.0, now - self._at) / TIME_CONSTANT)
