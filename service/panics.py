"""Faults of libraries in Rust as errors like any other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def panics_are_errors(of: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """A panic of a library's Rust is a BaseException, which would pass every guard of one request. of: what
    panics, for the RuntimeError."""

    def decorate(method: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(method)
        def guarded(*arguments: _P.args, **options: _P.kwargs) -> _T:
            try:
                return method(*arguments, **options)
            except BaseException as error:
                if type(error).__name__ == "PanicException":
                    raise RuntimeError(f"{of} panicked: {error}") from error
                raise

        return guarded

    return decorate
