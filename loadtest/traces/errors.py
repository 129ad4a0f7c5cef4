"""What can be wrong with a trace."""

from __future__ import annotations

from pageturner.loadtest.errors import LoadtestError


class TraceError(LoadtestError):
    """A trace cannot be read; says which, where and why."""


class LineError(ValueError):
    """A line of a file cannot be read. line: from 1. field: the column's name or the key; empty for the line.

    Readers of a file turn it into their own error, which names the file too.
    """

    def __init__(self, line: int, field: str, reason: str) -> None:
        super().__init__(line, field, reason)
        self.line = line
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        place = f"line {self.line}, {self.field}" if self.field else f"line {self.line}"
        return f"{place}: {self.reason}"
