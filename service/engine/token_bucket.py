"""Tokens a minute, as a bucket: a level that fills evenly and that requests take from."""

from __future__ import annotations

SECONDS = 60.0
"""What a full bucket holds is filled in so long."""


class TokenBucket:
    """Holds one minute's worth, full at first.

    A request takes the most that it may use when it is accepted, and gives back at its end what it did not
    use: so however many run at once, they cannot use more than was there. One that asks for more than a
    bucket holds is let in when the bucket is full, and leaves it in debt, by its own size at most: the next
    is let in once that is paid. Source: the token bucket of traffic policing (RFC 2697), which has no debt,
    hence no packet larger than itself.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self._capacity = float(per_minute)
        self._level = self._capacity
        self._at = now

    def level(self, now: float) -> float:
        """Tokens that may be taken now; below 0 in debt."""
        return min(self._capacity, self._level + max(0.0, now - self._at) * self._capacity / SECONDS)

    def is_full(self, now: float) -> bool:
        """Whether it would be no different if it were made now."""
        return self.level(now) >= self._capacity

    def seconds_until(self, num_tokens: int, now: float) -> float:
        """How long until so many may be taken, if nothing is given back; 0 if they may now. A bucket that
        holds nothing never lets any be taken, and says a minute."""
        if not self._capacity:
            return SECONDS
        missing = min(float(num_tokens), self._capacity) - self.level(now)
        return max(0.0, missing) * SECONDS / self._capacity

    def take(self, num_tokens: int, now: float) -> None:
        """Take tokens; the caller has seen that `seconds_until` them is 0."""
        self._set(self.level(now) - num_tokens, now)

    def give_back(self, num_tokens: int, now: float) -> None:
        """Of those taken before."""
        self._set(self.level(now) + num_tokens, now)

    def resize(self, per_minute: int, now: float) -> None:
        """Another rate from now on. A raise adds room, and forgives no debt; a cut makes none."""
        level, former = self.level(now), self._capacity
        self._capacity = float(per_minute)
        self._set(level + max(0.0, self._capacity - former), now)

    def _set(self, level: float, now: float) -> None:
        self._level, self._at = min(self._capacity, level), now
