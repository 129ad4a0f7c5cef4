"""How long many decode steps take that differ only by the tokens each adds, and how many a time holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pageturner.service.simulator.step_time import StepTimeModel


@dataclass(frozen=True, slots=True)
class StretchTime:
    """Seconds of decode steps. a_step: each. a_decode: each sequence of it, all but what it reads. a_context:
    each token that one of them reads."""

    a_step: float
    a_decode: float
    a_context: float

    @staticmethod
    def of(model: StepTimeModel) -> StretchTime:
        """By the step times of a machine."""
        a_decode = model.a_sequence + model.a_token + model.a_sample
        return StretchTime(model.a_step, a_decode, model.a_read_token + model.an_attended_pair)

    def seconds(self, steps: int, count: int, context: int) -> float:
        """Of so many steps of `count` sequences, which read `context` tokens together in the first and one
        more each in every further one."""
        num_read = steps * context + count * (steps * (steps - 1) // 2)
        return steps * (self.a_step + count * self.a_decode) + num_read * self.a_context

    def steps_until(self, seconds: float, count: int, context: int) -> int:
        """The fewest steps, one at least, that take so long: `seconds` is a x^2 + b x of their number."""
        a = self.a_context * count / 2
        b = self.a_step + count * self.a_decode + self.a_context * (context - count / 2)
        root = (math.sqrt(b * b + 4 * a * seconds) - b) / (2 * a) if a else seconds / b
        steps = max(1, math.floor(root))
        while steps > 1 and self.seconds(steps - 1, count, context) >= seconds:
            steps -= 1
        while self.seconds(steps, count, context) < seconds:
            steps += 1
        return steps
