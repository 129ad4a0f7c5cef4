"""A runner as the engine calls it."""

from __future__ import annotations

from collections.abc import Iterable

from pageturner.service.core.outputs import SampledSequence, SchedulerOutput
from pageturner.service.model.runner import Runner
from pageturner.service.model.scores import StepLogits


class StepRunner:
    """A `Runner` as the engine's steps call it: what it computes is what the sampler reads."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def forward(self, output: SchedulerOutput) -> StepLogits:
        return self._runner.step(output)

    def note_sampled(self, sampled: Iterable[SampledSequence]) -> None:
        self._runner.note_sampled(sampled)
