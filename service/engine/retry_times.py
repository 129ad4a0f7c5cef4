"""When a refused client should come again: at the moment at which the queue has room for it."""

from __future__ import annotations

from random import Random

LEAST_SECONDS = 0.1
MOST_SECONDS = 60.0
JITTER = 0.2
"""The most, as a share of a wait, that is drawn at random on top of it: who was refused together does not
return together."""


class RetryTimes:
    """Hands out the room that will fall free, to one refused client after the other.

    Each is told the moment at which the queue has room for it and for all that were refused before it and
    are still due: so many as there is room for return at a time. Nothing is reserved: who does not return
    costs those behind it a longer wait than they would have needed, MOST_SECONDS at most.

    random: draws the jitter.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._next_room = 0.0

    def seconds(self, now: float, wait_seconds: float, own_seconds: float) -> float:
        """From `now` on. wait_seconds: until the queue has room for this request, were it alone.
        own_seconds: that it takes of the queue's time, once it is in."""
        at = max(now + max(0.0, wait_seconds), self._next_room)
        self._next_room = min(at + max(0.0, own_seconds), now + MOST_SECONDS)
        seconds = (at - now) * (1.0 + JITTER * self._random.random())
        return min(max(seconds, LEAST_SECONDS), MOST_SECONDS)
