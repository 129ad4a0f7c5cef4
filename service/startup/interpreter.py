"""How the threads of a serving process share the interpreter."""

from __future__ import annotations

import sys
from collections.abc import Callable

SWITCH_SECONDS = 0.001


def share_interpreter(set_interval: Callable[[float], object] = sys.setswitchinterval) -> None:
    """Let a thread that waits for the interpreter's lock have it after a millisecond.

    The engine thread lets go of the lock in each operation of the model, and the event loop at each look for
    what has come. The other thread, busy in Python, then keeps it for Python's 5 ms: that is several steps
    of a fast model, and longer than all messages of a step take.
    """
    set_interval(SWITCH_SECONDS)
