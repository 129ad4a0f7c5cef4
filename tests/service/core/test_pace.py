"""The pace: what steps cost, how fast a queue drains, how long answers are; learned from steps that ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pageturner.policies.views import Rates
from pageturner.service.core.outlook import Work
from pageturner.service.core.scheduling.forecast import concurrency
from pageturner.service.core.scheduling.pace import (
    FEWEST_LENGTHS,
    NUM_LENGTHS,
    PRIOR_SECONDS,
    SHORT,
    TRUSTED_GAIN,
    TYPICAL,
    Pace,
)

RATES = Rates(prefill_seconds_fixed=0.01, prefill_seconds_per_token=0.001)
COMMON = settings(deadline=None, max_examples=60)
amounts = st.floats(0.0, 1e3)
counts = st.integers(0, 1000)


def run_steps(
    pace: Pace, seconds: float, *, steps: int = 5, prompt: int = 0, output: int = 0, drained: int = 0
) -> None:
    """So many steps have ended, behind which requests waited where they drained a queue."""
    pace.new_seconds += seconds
    pace.new_steps += steps
    pace.new_prompt_tokens += prompt
    pace.new_output_tokens += output
    if drained:
        pace.new_drain_seconds += seconds
        pace.new_drained += drained
    pace.fold()


def test_before_any_step_the_measured_rates_foretell() -> None:
    pace = Pace(RATES, full_rows=16)
    assert pace.step_seconds(16) == 0.01 + 16 * 0.001
    assert pace.drain_rate == 16 / pace.step_seconds(16)
    assert pace.outputs_left(0, 100, TYPICAL) == 1, "of lengths nothing is known"


def test_the_drain_rate_is_what_a_queue_loses_and_counts_no_idle_time() -> None:
    pace = Pace(RATES, full_rows=16)
    for _ in range(300):
        run_steps(pace, 0.1, output=80, drained=200)
    assert abs(pace.drain_rate - 2000) < 20
    before = pace.drain_rate
    for _ in range(100):
        run_steps(pace, 0.1, output=5)  # nothing waits: a slow step says nothing of a queue
    assert pace.drain_rate == before


def test_steps_that_only_compute_again_what_was_preempted_lower_the_rate_and_never_to_zero() -> None:
    pace = Pace(RATES, full_rows=16)
    rate = pace.drain_rate
    for _ in range(500):
        pace.new_seconds = pace.new_drain_seconds = 1.0
        pace.new_steps = 1
        pace.fold()
    assert 0 < pace.drain_rate < rate / 1000


def test_costs_of_each_kind_are_told_apart() -> None:
    """On a machine whose tokens of answers cost five times those of prompts, unlike its rates at start."""
    pace = Pace(RATES, full_rows=16)
    for number in range(2000):
        steps, prompt, output = 1 + number % 5, 50 * (number % 4), 20 * (number % 7)
        run_steps(
            pace, 0.02 * steps + 0.002 * prompt + 0.010 * output, steps=steps, prompt=prompt, output=output
        )
    assert abs(pace.step - 0.02) < 0.004
    assert abs(pace.prompt_token - 0.002) < 0.0004
    assert abs(pace.output_token - 0.010) < 0.002


def test_a_stall_moves_no_price_by_more_than_its_share() -> None:
    pace = Pace(RATES, full_rows=16)
    run_steps(pace, 1000.0, steps=1, output=16)
    assert pace.step_seconds(16) < 2 * (0.01 + 16 * 0.001)


def test_lengths_are_foretold_by_answers_that_were_longer() -> None:
    pace = Pace(RATES, full_rows=16)
    for length in range(10, 10 + NUM_LENGTHS):
        pace.answered(length, is_cut=False)
    assert pace.outputs_left(0, 1000, SHORT) < pace.outputs_left(0, 1000, TYPICAL)
    assert pace.outputs_left(0, 20, TYPICAL) == 20, "max_tokens is the most"
    assert pace.outputs_left(200, 1000, TYPICAL) == 1, "none was as long"
    for _ in range(NUM_LENGTHS):
        pace.answered(32, is_cut=True)
    assert pace.outputs_left(0, 700, SHORT) == 700, "what max_tokens cut would have gone on"


def test_too_few_answers_foretell_nothing() -> None:
    pace = Pace(RATES, full_rows=16)
    for _ in range(FEWEST_LENGTHS - 1):
        pace.answered(50, is_cut=False)
    assert pace.outputs_left(0, 100, TYPICAL) == 1
    pace.answered(50, is_cut=False)
    assert pace.outputs_left(0, 100, TYPICAL) == 50


@COMMON
@given(st.lists(st.tuples(st.floats(1e-6, 1e4), counts, counts, counts, counts), max_size=30))
def test_whatever_steps_were_the_pace_is_positive_and_comes_back_from_its_snapshot(
    steps: list[tuple[float, int, int, int, int]],
) -> None:
    pace = Pace(RATES, full_rows=16)
    for seconds, num_steps, prompt, output, drained in steps:
        run_steps(pace, seconds, steps=num_steps, prompt=prompt, output=output, drained=drained)
        pace.answered(output, is_cut=bool(drained % 2))
        pace.started(Work(prompt, 1 + num_steps, 1 + output))
        pace.new_decodes, pace.new_drafts, pace.new_gained = num_steps, drained, min(drained, output)
    assert pace.drain_rate > 0
    assert min(pace.step, pace.prompt_token, pace.output_token) > 0
    copy = Pace(Rates(), full_rows=3)
    copy.restore(pace.snapshot())
    assert copy.snapshot() == pace.snapshot()
    assert copy.outputs_left(3, 99, TYPICAL) == pace.outputs_left(3, 99, TYPICAL)
    assert copy.prompt_ratio == pace.prompt_ratio
    assert copy.usual_drafting == pace.usual_drafting
    pace.started(Work(7, 1, 1))
    copy.started(Work(7, 1, 1))
    assert copy.prompt_ratio == pace.prompt_ratio


def test_the_prior_weighs_as_much_as_it_says() -> None:
    pace = Pace(RATES, full_rows=16)
    prior = pace.drain_rate
    run_steps(pace, PRIOR_SECONDS, drained=1000)
    assert prior < pace.drain_rate < 1000 or 1000 < pace.drain_rate < prior


def test_prompts_to_come_are_those_of_late_whatever_runs() -> None:
    pace = Pace(RATES, full_rows=16)
    for _ in range(FEWEST_LENGTHS):
        assert pace.prompt_ratio is None
        pace.started(Work(64, 1, 100))
        pace.answered(32, is_cut=False)
    assert pace.prompt_ratio == 64 / 32
    for _ in range(NUM_LENGTHS):
        pace.started(Work(16, 2, 16))
    assert pace.prompt_ratio == 16 / 16, "max_tokens is the most, and the oldest are forgotten"


def test_guesses_are_reckoned_with_by_half_and_forgotten() -> None:
    pace = Pace(RATES, full_rows=16)
    assert not pace.has_drafts
    for _ in range(100):
        pace.new_decodes, pace.new_drafts, pace.new_gained, pace.new_seconds = 100, 400, 300, 0.1
        pace.fold()
    usual = pace.usual_drafting
    assert 3.9 < usual.drafts <= 4.0
    assert 0.5 * TRUSTED_GAIN * 3.0 < usual.gain <= TRUSTED_GAIN * 3.0
    for _ in range(100):
        pace.new_decodes, pace.new_seconds = 100, 0.1
        pace.fold()
    assert pace.usual_drafting.gain < 0.2 * usual.gain


def test_before_requests_have_started_the_prompts_of_those_that_run_count_less_what_was_cached() -> None:
    pace = Pace(RATES, full_rows=16)
    running: Any = [
        SimpleNamespace(num_slots=1, num_prompt_tokens=100, num_cached_prompt_tokens=60, max_tokens=10),
        SimpleNamespace(num_slots=3, num_prompt_tokens=20, num_cached_prompt_tokens=0, max_tokens=10),
    ]
    company = concurrency(pace, running)
    assert company.num_rows == 4
    assert company.prompt_ratio == 60 / (4 * pace.outputs_left(0, 10, TYPICAL))
    assert concurrency(pace, []).prompt_ratio == 0.0
