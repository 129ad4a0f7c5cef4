"""How many lines of the log strangers may cause: each of their calls would be one, and they pay nothing for
it."""

from __future__ import annotations

from pageturner.service.core.clock import Clock

LINES_PER_SECOND = 5.0
BURST = 50


class LineBudget:
    """A bucket of lines that fills evenly; what finds it empty is counted and told with the next that does
    not."""

    def __init__(self, clock: Clock, per_second: float = LINES_PER_SECOND, burst: int = BURST) -> None:
        self._clock = clock
        self._per_second = per_second
        self._burst = float(burst)
        self._left = self._burst
        self._filled_at = clock.now()
        self._num_left_out = 0

    def take(self) -> int | None:
        """The number of lines left out since the last that was taken; None where this one is left out too."""
        now = self._clock.now()
        self._left = min(self._burst, self._left + (now - self._filled_at) * self._per_second)
        self._filled_at = now
        if self._left < 1.0:
            self._num_left_out += 1
            return None
        self._left -= 1.0
        left_out, self._num_left_out = self._num_left_out, 0
        return left_out
