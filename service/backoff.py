"""Times that double with each failure in a row."""

from __future__ import annotations

FIRST_REST, LONGEST_REST = 0.5, 30.0
"""Seconds that a server is left alone after a failure, among several that stand in for one another."""

_MOST_DOUBLINGS = 64
"""Beyond any bound that is in use: a float overflows at some thousand, and raises."""


def doubled(first_seconds: float, num_times: int, longest_seconds: float) -> float:
    """first_seconds, doubled so many times, and at most longest_seconds."""
    return min(longest_seconds, first_seconds * 2.0 ** min(num_times, _MOST_DOUBLINGS))


def rest_seconds(num_failures: int) -> float:
    """How long a server is left alone that had so many failures in a row before this one."""
    return doubled(FIRST_REST, num_failures, LONGEST_REST)
