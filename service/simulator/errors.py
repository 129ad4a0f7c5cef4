"""What can be wrong with an experiment."""

from __future__ import annotations

from pageturner.service.errors import PageturnerError


class WorkloadError(PageturnerError):
    """A workload cannot be read or made; says which and why."""


class MachineError(PageturnerError):
    """A machine file cannot be read; says which and why."""


class SimulationStuck(PageturnerError):
    """The scheduler had work and planned nothing, again and again: the laboratory found a bug or a wall."""


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
