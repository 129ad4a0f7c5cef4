"""How long a step takes on some machine: affine in what the step does, and fitted from steps that were timed.

Real hardware overlaps memory and arithmetic; the sum errs upwards where both matter, by at most a factor
of two. What the fit leaves over is printed by `pageturner calibrate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

from pageturner.policies.views import Rates
from pageturner.service.flight.step_work import StepWork

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
            if not (math.isfinite(value) and value >= 0):
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


def fit(steps: Sequence[TimedStep]) -> StepTimeModel:
    """The model with the least squares of relative errors, no coefficient below 0.

    Relative to what the model itself predicts, found by going over it a few times: so a step of a
    millisecond counts as much as one of a second, and noise, which only ever adds time, is met in its mean
    (relative to the seconds seen, long outliers would count for nothing). A unit of work that no step does
    costs 0. Raises ValueError without steps that took time.
    """
    timed = [step for step in steps if step.seconds > 0]
    if not timed:
        raise ValueError("a fit needs at least one step that took time")
    scales = [step.seconds for step in timed]
    for _ in range(_NUM_REWEIGHTS):
        model = _fit_scaled(timed, scales)
        floor = 1e-3 * math.fsum(scales) / len(scales)
        scales = [max(model.seconds(step.work), floor) for step in timed]
    return model


def _fit_scaled(steps: Sequence[TimedStep], scales: Sequence[float]) -> StepTimeModel:
    """Least squares of errors over `scales`, the most negative coefficient struck out until none is left."""
    rows = [[x / scale for x in astuple(step.work)] for step, scale in zip(steps, scales, strict=True)]
    targets = [step.seconds / scale for step, scale in zip(steps, scales, strict=True)]
    active = [column for column in range(len(rows[0])) if any(row[column] for row in rows)]
    solved: list[float] = []
    while active:
        solved = _least_squares([[row[column] for column in active] for row in rows], targets)
        lowest = min(range(len(active)), key=solved.__getitem__)
        if solved[lowest] >= 0:
            break
        del active[lowest]
    coefficients = dict(zip(active, solved, strict=True)) if active else {}
    return StepTimeModel(*(coefficients.get(column, 0.0) for column in range(len(rows[0]))))


def fit_error(model: StepTimeModel, steps: Sequence[TimedStep]) -> FitError:
    """How far `model` is off on `steps`, of which there must be one at least."""
    errors = sorted(abs(model.seconds(step.work) - step.seconds) / step.seconds for step in steps)
    return FitError(len(errors), math.fsum(errors) / len(errors), errors[len(errors) // 2], errors[-1])


def _least_squares(rows: list[list[float]], targets: list[float]) -> list[float]:
    """The x for which each row times x is nearest to its target, by the normal equations.

    Columns are scaled to unit length first, and a ridge far below what a fit can tell keeps columns that
    depend on each other solvable.
    """
    width = len(rows[0])
    scale = [math.sqrt(math.fsum(row[i] ** 2 for row in rows)) for i in range(width)]
    scaled = [[value / scale[i] for i, value in enumerate(row)] for row in rows]
    matrix = [
        [math.fsum(row[i] * row[j] for row in scaled) + (1e-10 if i == j else 0.0) for j in range(width)]
        + [math.fsum(row[i] * target for row, target in zip(scaled, targets, strict=True))]
        for i in range(width)
    ]
    for pivot in range(width):
        best = max((abs(matrix[i][pivot]), i) for i in range(pivot, width))[1]
        matrix[pivot], matrix[best] = matrix[best], matrix[pivot]
        for i in range(width):
            if i != pivot:
                factor = matrix[i][pivot] / matrix[pivot][pivot]
                matrix[i] = [a - factor * b for a, b in zip(matrix[i], matrix[pivot], strict=True)]
    return [matrix[i][width] / matrix[i][i] / scale[i] for i in range(width)]
