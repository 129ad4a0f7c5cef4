"""What metrics are counted with: histograms, recent rates, labels of which only so many are kept."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

OTHER = "other"
"""The label of all values that came when a label had as many as it may."""


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Observations at or below each bound (cumulative, the last one is `count`), and their sum."""

    bounds: tuple[float, ...]
    cumulative: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """All observations."""
        return self.cumulative[-1]


class Histogram:
    """Counts by upper bound; the last bucket has none. O(log bounds) an observation."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value` so many times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def snapshot(self) -> HistogramSnapshot:
        """A frozen copy."""
        return HistogramSnapshot(self._bounds, tuple(accumulate(self._counts)), self._sum)


class RecentRate:
    """How many came a second, over the last whole WINDOW_SECONDS. One thread adds, any may read."""

    WINDOW_SECONDS = 10

    __slots__ = ("_counts", "_seconds")

    def __init__(self) -> None:
        size = self.WINDOW_SECONDS + 2  # the second under way, and one that a reader may still add up
        self._counts = [0] * size
        self._seconds = [-1] * size

    def add(self, count: int, now: float) -> None:
        """`now` does not go back."""
        second = int(now)
        slot = second % len(self._counts)
        if self._seconds[slot] != second:
            self._counts[slot] = 0
            self._seconds[slot] = second
        self._counts[slot] += count

    def per_second(self, now: float) -> float:
        """The mean over the window, which ends with the last whole second before `now`."""
        end = int(now)
        first = end - self.WINDOW_SECONDS
        pairs = zip(self._seconds, self._counts, strict=True)
        return sum(count for second, count in pairs if first <= second < end) / self.WINDOW_SECONDS


class BoundedLabel:
    """The first `limit` values of a label as they are, each later one as OTHER.

    What was counted stays counted, so a value is never let go: callers choose values freely, and each is a
    series for ever in the memory of whoever scrapes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: set[str] = set()

    def of(self, value: str) -> str:
        """The label to count `value` under."""
        if value in self._values:
            return value
        if len(self._values) >= self._limit:
            return OTHER
        self._values.add(value)
        return value
