"""Where the time of a step goes whose rows are scored: layers, the head over all rows, log-probabilities."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from pageturner.service.core.outputs import SampleRow, ScheduledSequence, SchedulerOutput, ScoreRun
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.model.runner import Runner
from pageturner.service.model.sampler import Sampler

ROWS = 256
"""`scheduler.max_scored_rows`, as it is by default."""


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """Median seconds of a prompt's step of `rows` rows. plain: all of it, with logits of the last row alone.
    head: what those of all other rows add. logprobs: what is made of them, by how many alternatives are
    wanted beside each token."""

    rows: int
    plain: float
    head: float
    logprobs: dict[int, float]


def measure_scored_step(runner: Runner, sampler: Sampler, block_size: int, rounds: int) -> ScoredStep:
    """By a model whose pool has ROWS slots at least. In turns."""
    token_ids = tuple(1000 + place for place in range(ROWS))
    row = SampleRow(0, 0, 0, 0, SamplingParams(temperature=0.0))
    table = tuple(range(-(-ROWS // block_size)))
    part = ScheduledSequence(0, "scored", 0, token_ids, 0, 0, table, (row,))
    plain = SchedulerOutput(1, (part,))
    scored = {
        count: SchedulerOutput(1, (replace(part, scored=(ScoreRun(0, 0, 0, token_ids[1:], count),)),))
        for count in (0, 1, 5)
    }
    seconds: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], object]) -> None:
        started = time.perf_counter()
        call()
        seconds.setdefault(name, []).append(time.perf_counter() - started)

    logits = runner.forward(scored[0])
    for _ in range(rounds + 1):
        timed("plain", lambda: sampler.sample(runner.forward(plain), plain))
        timed("forward", lambda: runner.forward(scored[0]))
        for count, output in scored.items():
            timed(f"{count}", partial(sampler.sample, logits, output))
    medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    return ScoredStep(
        ROWS,
        medians["plain"],
        medians["forward"] - medians["plain"],
        {count: medians[f"{count}"] for count in scored},
    )
