"""What a step takes more whose rows are scored: by a head that writes no logits where there is one, and by
the logits of all rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pageturner.service.core.outputs import SampleRow, ScheduledSequence, SchedulerOutput, ScoreRun
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.model.runner import Runner
from pageturner.service.model.sampler import Sampler

ROWS = 256
"""Of the step."""
COUNTS = (0, 1, 5)
"""Alternatives wanted beside each token."""


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """Median seconds of a prompt's step of `rows` rows. plain: all of it, with logits of the last row alone.
    scored, by_logits: what scores of all others add, by how many alternatives are wanted."""

    rows: int
    plain: float
    scored: dict[int, float]
    by_logits: dict[int, float]


def measure_scored_step(runner: Runner, sampler: Sampler, block_size: int, rounds: int) -> ScoredStep:
    """By a model whose pool has ROWS slots at least. In turns."""
    token_ids = tuple(1000 + place for place in range(ROWS))
    row = SampleRow(0, 0, 0, 0, SamplingParams(temperature=0.0))
    table = tuple(range(-(-ROWS // block_size)))
    part = ScheduledSequence(0, "scored", 0, token_ids, 0, 0, table, (row,))
    plain = SchedulerOutput(1, (part,))
    seconds: dict[tuple[str, int], list[float]] = {}

    def timed(key: tuple[str, int], call: Callable[[], object]) -> None:
        started = time.perf_counter()
        call()
        seconds.setdefault(key, []).append(time.perf_counter() - started)

    def once(count: int) -> None:
        run = ScoreRun(0, 0, 0, token_ids[1:], count)
        output = SchedulerOutput(1, (replace(part, scored=(run,)),))
        timed(("scored", count), lambda: sampler.sample(runner.step(output), output))
        timed(("by logits", count), lambda: sampler.sample(runner.forward(output), output))

    for _ in range(rounds + 1):
        timed(("plain", 0), lambda: sampler.sample(runner.step(plain), plain))
        for count in COUNTS:
            once(count)
    medians = {key: statistics.median(each[1:]) for key, each in seconds.items()}
    without = medians["plain", 0]
    return ScoredStep(
        ROWS,
        without,
        {count: medians["scored", count] - without for count in COUNTS},
        {count: medians["by logits", count] - without for count in COUNTS},
    )
