"""What of a sequence no layer sees any more, by the windows of all layers."""

from __future__ import annotations

from collections.abc import Iterable


def widest(windows: Iterable[int | None]) -> int | None:
    """Keys that a position sees at most in whichever layer sees most; None where one of them sees everything.

    windows: of each layer, None for one that sees everything.
    """
    widest_yet = 0
    for window in windows:
        if window is None:
            return None
        widest_yet = max(widest_yet, window)
    return widest_yet or None
