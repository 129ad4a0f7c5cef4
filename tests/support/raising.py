"""What a worker process does in the tests of errors that travel between processes."""

from __future__ import annotations


def fail_with(error: BaseException) -> None:
    raise error
