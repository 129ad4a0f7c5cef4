"""How long a step takes on some machine: affine in what the step does, and fitted from steps that were timed.

Real hardware overlaps memory and arithmetic; the sum errs upwards where both matter, by at most a factor
of two. What the fit leaves over is printed by `pageturner calibrate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from types import MappingProxyType

from pageturner.policies.views import Rates
from pageturner.service.flight.step_work import StepWork
from pageturner.service.simulator.least_squares import nonnegative_least_squares

_NUM_REWEIGHTS = 4


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Seconds for each unit of StepWork, in its order, none below 0.

    a_step: whatever the batch (weights read once, launches, the engine's own loop). a_sequence, a_token,
    a_sample, a_read_token, an_attended_pair, a_swap_out, a_swap_in, a_copy: each one more.
    """

    a_step: float
    a_sequence: float = 0.0
    a_token: float = 0.0
    a_sample: float = 0.0
    a_read_token: float = 0.0
    an_attended_pair: float = 0.0
    a_swap_out: float = 0.0
    a_swap_in: float = 0.0
    a_copy: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{field.name} must be finite and at least 0, not {value}")

    def seconds(self, work: StepWork) -> float:
        """How long a step takes that does `work`."""
        return (
            self.a_step * work.num_steps
            + self.a_sequence * work.num_sequences
            + self.a_token * work.num_tokens
            + self.a_sample * work.num_samples
            + self.a_read_token * work.num_read_tokens
            + self.an_attended_pair * work.num_attended_pairs
            + self.a_swap_out * work.num_swapped_out
            + self.a_swap_in * work.num_swapped_in
            + self.a_copy * work.num_copied
        )

    def scaled(self, factor: float) -> StepTimeModel:
        """Of a machine on which every step takes `factor` times as long."""
        return StepTimeModel(*(factor * seconds for seconds in astuple(self)))

    def rates(self, block_bytes: int) -> Rates:
        """What the engine would have measured on this machine, for the policies that weigh costs."""
        return Rates(
            swap_out_bytes_per_second=block_bytes / max(self.a_swap_out, 1e-12),
            swap_in_bytes_per_second=block_bytes / max(self.a_swap_in, 1e-12),
            block_bytes=block_bytes,
            prefill_seconds_fixed=self.a_step,
            prefill_seconds_per_token=self.a_token,
            prefill_seconds_per_token_context=self.an_attended_pair,
        )


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step that was run: what it did, and the seconds it took."""

    work: StepWork
    seconds: float


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative errors of a model on timed steps: |predicted - seen| / seen."""

    num_steps: int
    mean: float
    median: float
    largest: float


def fit(steps: Sequence[TimedStep], known: Mapping[str, float] = MappingProxyType({})) -> StepTimeModel:
    """The model with the least squares of relative errors, no coefficient below 0.

    known: coefficients by name that are not to be fitted, but taken as they are.

    Relative to what the model itself predicts, found by going over it a few times: so a step of a
    millisecond counts as much as one of a second, and noise, which only ever adds time, is met in its mean
    (relative to the seconds seen, long outliers would count for nothing). A unit of work that no step does
    costs 0, unless it is known. Raises ValueError without steps that took time.
    """
    timed = [step for step in steps if step.seconds > 0]
    if not timed:
        raise ValueError("a fit needs at least one step that took time")
    scales = [step.seconds for step in timed]
    for _ in range(_NUM_REWEIGHTS):
        model = _fit_scaled(timed, scales, known)
        floor = 1e-3 * math.fsum(scales) / len(scales)
        scales = [max(model.seconds(step.work), floor) for step in timed]
    return model


def _fit_scaled(
    steps: Sequence[TimedStep], scales: Sequence[float], known: Mapping[str, float]
) -> StepTimeModel:
    """Least squares of errors over `scales`."""
    names = [field.name for field in fields(StepTimeModel)]
    given = StepTimeModel(**{"a_step": 0.0, **known})
    rows = [[x / scale for x in astuple(step.work)] for step, scale in zip(steps, scales, strict=True)]
    targets = [
        (step.seconds - given.seconds(step.work)) / scale for step, scale in zip(steps, scales, strict=True)
    ]
    used = [i for i, name in enumerate(names) if name not in known and any(row[i] for row in rows)]
    solved = nonnegative_least_squares([[row[i] for i in used] for row in rows], targets)
    return replace(given, **{names[i]: value for i, value in zip(used, solved, strict=True)})


def fit_error(model: StepTimeModel, steps: Sequence[TimedStep]) -> FitError:
    """How far `model` is off on `steps`, of which there must be one at least."""
    errors = sorted(abs(model.seconds(step.work) - step.seconds) / step.seconds for step in steps)
    return FitError(len(errors), math.fsum(errors) / len(errors), errors[len(errors) // 2], errors[-1])
