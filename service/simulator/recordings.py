"""A recording of a service becomes a machine: its pools and bounds as they were, its step times fitted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pageturner.loadtest.traces.errors import LineError
from pageturner.loadtest.traces.json_traces import RECORDING_KEY, STEP_KEY
from pageturner.loadtest.traces.lines import OnBytes, ignore_bytes, json_objects, open_lines
from pageturner.service.codec import scalar
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.flight.step_work import StepWork
from pageturner.service.simulator.errors import MachineError
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.step_time import FitError, TimedStep, fit, fit_error
from pageturner.service.simulator.tables import read_table

MAX_TRUSTED_ERROR = 0.1
"""Mean relative error of a fit above which it comes with a warning."""

_SWAP_WORK = {"a_swap_out": "swap_out_bytes_per_second", "a_swap_in": "swap_in_bytes_per_second"}
"""Prices of StepTimeModel that the engine measures itself, by the names of its Rates."""


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """header: of the recording. steps: all that were timed, in order. notes: what was left out, in words."""

    header: Mapping[str, Any]
    steps: tuple[TimedStep, ...]
    notes: tuple[str, ...] = ()


def read_steps(path: Path, on_bytes: OnBytes = ignore_bytes) -> RecordedSteps:
    """The header and every timed step of a `serve --record` file. Raises MachineError."""
    header: Mapping[str, Any] | None = None
    steps: list[TimedStep] = []
    try:
        with open_lines(path, on_bytes) as lines:
            for entry in json_objects(lines):
                if RECORDING_KEY in entry:
                    header = entry
                elif STEP_KEY in entry:
                    steps.append(_timed_step(entry, lines.number))
            notes = tuple(lines.notes)
    except OSError as error:
        raise MachineError(f"{path}: {error.strerror or error}") from error
    except LineError as error:
        raise MachineError(f"{path}, {error}") from error
    if header is None or not steps:
        raise MachineError(f"{path} has no header or no steps: is it what `serve --record` wrote?")
    return RecordedSteps(header, tuple(steps), notes)


def _timed_step(entry: Mapping[str, Any], line: int) -> TimedStep:
    work, seconds = entry[STEP_KEY], entry.get("seconds")
    if not isinstance(work, list) or len(work) > len(fields(StepWork)) or not all(map(_is_count, work)):
        raise LineError(line, STEP_KEY, f"{work!r} is not a list of counts")
    try:
        return TimedStep(StepWork(*work), scalar(seconds, float))
    except ValueError as error:
        raise LineError(line, "seconds", str(error)) from None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 0


@dataclass(frozen=True, slots=True)
class MachineFit:
    """A machine whose step times were fitted. error: how far they are from those seen. notes: what was left
    out or taken from elsewhere, in words. warnings: reasons to trust it less."""

    machine: SimulatedMachine
    error: FitError
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def fit_machine(path: Path, on_bytes: OnBytes = ignore_bytes) -> MachineFit:
    """The machine of a `serve --record` file. Raises MachineError."""
    recorded = read_steps(path, on_bytes)
    header, steps = recorded.header, recorded.steps
    notes, warnings = list(recorded.notes), []
    try:
        block_bytes = int(header["block_bytes"])
        # Swaps are rare and short beside a step: fitted, they would cost what noise makes of them.
        measured = _measured_prices(header, block_bytes)
        model = fit(steps, known=measured)
        if measured:
            notes.append(f"{_words(measured)}: as the engine measured when it started")
        machine = SimulatedMachine(
            name=str(header["name"]),
            derivation=(f"Fitted to {len(steps)} steps of a recording.", *notes),
            step_time=model,
            block_bytes=block_bytes,
            cache=read_table(CacheOptions, header["cache"], "cache."),
            scheduler=read_table(SchedulerOptions, header["scheduler"], "scheduler."),
        )
        error = fit_error(model, [step for step in steps if step.seconds > 0])
    except KeyError as failure:
        raise MachineError(f"{path}: the header has no {failure}") from failure
    except (TypeError, ValueError, ArithmeticError) as failure:
        raise MachineError(f"{path} is no recording: {failure}") from failure
    if error.mean > MAX_TRUSTED_ERROR:
        warnings.append(
            f"the step times are off by {error.mean:.0%} on average: was the machine busy otherwise, or "
            "were there too few steps of each kind?"
        )
    free = [name for name in _SWAP_WORK if getattr(model, name) == 0]
    if free:
        warnings.append(
            f"{_words(free)} costs nothing here, since the recording does not tell: "
            "policies that weigh swaps will take them for free"
        )
    return MachineFit(machine, error, tuple(notes), tuple(warnings))


def _measured_prices(header: Mapping[str, Any], block_bytes: int) -> dict[str, float]:
    """Seconds of a block that is swapped, as the engine measured them; none where the header has no rates."""
    rates = header.get("rates") or {}
    return {name: block_bytes / float(rates[rate]) for name, rate in _SWAP_WORK.items() if rate in rates}


def _words(names: Iterable[str]) -> str:
    return " and ".join(name.replace("_", " ") for name in names)
