"""What can be wrong with an experiment."""

from __future__ import annotations

from pageturner.service.errors import PageturnerError


class WorkloadError(PageturnerError):
    """A workload cannot be read or made; says which and why."""


class MachineError(PageturnerError):
    """A machine file cannot be read; says which and why."""


class SimulationStuck(PageturnerError):
    """The scheduler had work and planned nothing, again and again: the laboratory found a bug or a wall."""
