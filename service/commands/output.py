"""Where commands print: standard output, flushed, so that a pipe sees each token as it comes."""

from __future__ import annotations

import sys


def write(text: str = "", end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


def note(text: str) -> None:
    """A remark that is not part of the result: standard error."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
