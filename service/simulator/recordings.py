"""A recording of a service becomes a machine: its pools and bounds as they were, its step times fitted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.flight.step_work import StepWork
from pageturner.service.simulator.errors import MachineError
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.step_time import FitError, TimedStep, fit, fit_error
from pageturner.service.simulator.traces import RECORDING_KEY


def read_steps(path: Path) -> tuple[dict[str, Any], list[TimedStep]]:
    """The header and every timed step of a `serve --record` file. Raises MachineError."""
    header, steps = None, []
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                entry = json.loads(line)
                if RECORDING_KEY in entry:
                    header = entry
                elif "step" in entry:
                    steps.append(TimedStep(StepWork(*entry["step"]), entry["seconds"]))
    except OSError as error:
        raise MachineError(f"{path}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise MachineError(f"{path} is no recording: {error}") from error
    if header is None or not steps:
        raise MachineError(f"{path} has no header or no steps")
    return header, steps


def fit_machine(path: Path) -> tuple[SimulatedMachine, FitError]:
    """The machine of a `serve --record` file. Raises MachineError."""
    header, steps = read_steps(path)
    try:
        model = fit(steps)
        machine = SimulatedMachine(
            name=str(header["name"]),
            derivation=(f"Fitted to {len(steps)} steps of a recording.",),
            step_time=model,
            block_bytes=int(header["block_bytes"]),
            cache=CacheOptions(**header["cache"]),
            scheduler=SchedulerOptions(**header["scheduler"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise MachineError(f"{path} is no recording: {error}") from error
    return machine, fit_error(model, [step for step in steps if step.seconds > 0])
