"""The fit finds known costs again, meets noise in its mean, and never says that work gives time back."""

from __future__ import annotations

import random
from dataclasses import astuple, replace

import pytest

from pageturner.service.core.outputs import (
    BlockCopies,
    BlockCopy,
    SampleRow,
    ScheduledSequence,
    SchedulerOutput,
)
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.flight.step_work import StepWork, work_of
from pageturner.service.simulator.step_time import StepTimeModel, TimedStep, fit, fit_error

KNOWN = StepTimeModel(0.01, 1e-4, 2e-4, 5e-5, 1e-7, 3e-9, 1e-3, 2e-3, 1e-5)


def some_works(count: int, seed: int = 0) -> list[StepWork]:
    rng = random.Random(seed)
    works = []
    for _ in range(count):
        num_sequences = rng.randint(1, 64)
        num_tokens = num_sequences + rng.randint(0, 512)
        num_read = rng.randint(num_tokens, 40_000)
        works.append(
            StepWork(
                1,
                num_sequences,
                num_tokens,
                rng.randint(0, num_sequences),
                num_read,
                num_tokens * rng.randint(1, 4000),
                rng.choice((0, 0, 9)),
                rng.choice((0, 0, 17)),
                rng.choice((0, 1)),
            )
        )
    return works


def test_known_costs_are_found_again() -> None:
    steps = [TimedStep(work, KNOWN.seconds(work)) for work in some_works(200)]
    found = fit(steps)
    assert astuple(found) == pytest.approx(astuple(KNOWN), rel=1e-3)
    assert fit_error(found, steps).largest < 1e-4


def test_noise_is_met_in_its_mean() -> None:
    """One step in five takes three times as long; what all take together must come out right."""
    rng = random.Random(1)
    steps = [
        TimedStep(work, KNOWN.seconds(work) * (3 if rng.random() < 0.2 else 1)) for work in some_works(2000)
    ]
    found = fit(steps)
    total = sum(step.seconds for step in steps)
    assert sum(found.seconds(step.work) for step in steps) == pytest.approx(total, rel=0.05)


def test_no_cost_is_negative_and_work_unseen_costs_nothing() -> None:
    steps = [TimedStep(StepWork(1, n, n, n, 0, 0), 0.02 - 1e-4 * n) for n in range(1, 50)]
    found = fit(steps)
    assert min(astuple(found)) == 0
    assert found.a_swap_out == found.a_copy == 0


def test_nothing_to_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one step"):
        fit([])


def test_a_cost_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="a_token"):
        StepTimeModel(0.01, a_token=-1.0)


def test_the_work_of_a_step_is_counted() -> None:
    def part(seq_id: int, num_tokens: int, start: int) -> ScheduledSequence:
        return ScheduledSequence(seq_id, "r", 0, (7,) * num_tokens, start, start, (0,), ())

    pairs = (BlockCopy(0, 1), BlockCopy(2, 3))
    output = SchedulerOutput(
        1, (part(0, 3, 10), part(1, 1, 5)), BlockCopies(swap_outs=pairs, copies=pairs[:1])
    )
    # 3 tokens on 10 attend to 11 + 12 + 13, and one on 5 to 6.
    assert work_of(output) == StepWork(1, 2, 4, 0, 19, 42, 2, 0, 1)
    row = SampleRow(2, 0, 0, 0, SamplingParams())
    drafting = replace(part(2, 4, 7), samples=(row,), num_drafts=3)
    assert work_of(SchedulerOutput(2, (drafting,))).num_samples == 4
    assert work_of(SchedulerOutput(2, (), BlockCopies(swap_ins=pairs))) == StepWork(num_swapped_in=2)


def test_the_rates_are_those_of_the_step_times() -> None:
    rates = KNOWN.rates(1 << 20)
    assert rates.swap_out_bytes_per_second == pytest.approx((1 << 20) / 1e-3)
    assert rates.prefill_seconds(100, 50) == pytest.approx(100 * 2e-4 + (100 * 50 + 5050) * 3e-9)
