"""Entries of the C++ library: functions that return how they ended (entry.h's Status)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import cast

_NO_MEMORY = 1


def entry(library: ctypes.CDLL, name: str, *argtypes: type) -> Callable[..., object]:
    """A function of the library.

    A call raises MemoryError where the system gave it no memory; nothing is lost by that but what it was to
    write, and the next call may go well.
    """
    function = getattr(library, name)
    function.argtypes, function.restype, function.errcheck = argtypes, ctypes.c_int, _check
    return cast(Callable[..., object], function)


def _check(status: int, function: object, _arguments: object) -> int:
    if status == _NO_MEMORY:
        raise MemoryError(f"no memory for {getattr(function, '__name__', 'an operation')} on the CPU")
    assert status == 0, status
    return status
