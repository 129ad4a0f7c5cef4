"""When a refused client should come again: at the moment at which the queue has room for it."""

from __future__ import annotations

import math
from random import Random

LEAST_SECONDS = 0.1
MOST_SECONDS = 60.0
MEMORY_SECONDS = 3.0
"""In which all but 1/e of the refused are forgotten: some clients never return, and nobody says which."""
JITTER = 0.2
"""The most, as a share of a wait, that is drawn at random on top of it: who was refused together does not
return together."""


class RetryTimes:
    """Hands out the room that will fall free, to one refused client after the other.

    Each is told the time until the queue has room for it and for those that were refused shortly before: so
    many as there is room for return at a time. Nothing is reserved.

    random: draws the jitter.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._promised = 0.0
        self._at = 0.0

    def seconds(self, now: float, wait_seconds: float, own_seconds: float) -> float:
        """From `now` on, which does not go back. wait_seconds: until the queue has room for this request,
        were it alone. own_seconds: that it takes of the queue's time, once it is in."""
        passed, self._at = now - self._at, now
        self._promised = max(0.0, self._promised - passed) * math.exp(-passed / MEMORY_SECONDS)
        seconds = max(0.0, wait_seconds) + self._promised
        self._promised = min(self._promised + max(0.0, own_seconds), MOST_SECONDS)
        seconds *= 1.0 + JITTER * self._random.random()
        return min(max(seconds, LEAST_SECONDS), MOST_SECONDS)
