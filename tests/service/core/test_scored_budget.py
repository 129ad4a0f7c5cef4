"""A step's budget counts what scored rows take more than others, and starves neither them nor the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.core_harness import CoreHarness

from pageturner.policies import registry
from pageturner.service.core.options import MAX_SCORED_ROW_COST, SchedulerOptions
from pageturner.service.core.outputs import SchedulerOutput
from pageturner.service.core.scheduling.step_budget import StepBudget
from pageturner.service.errors import ConfigError

PROMPT = (0, 1, 2, 2, 1, 0, 0, 1, 1, 2, 0, 2, 1)
CONTINUATIONS = ((0, 1, 2, 2, 0), (1,), (0, 1, 1, 2))


def harness(cost: float | None, budget: int = 8, **changes: Any) -> CoreHarness:
    options = SchedulerOptions(
        max_model_len=64, max_num_seqs=8, max_num_batched_tokens=budget, scored_row_cost=cost, **changes
    )
    return CoreHarness(
        registry.create_set({"admission": "first-chunk"}), num_blocks=64, block_size=2, options=options
    )


def cost_of(output: SchedulerOutput, cost: float) -> float:
    """What the step takes, in plain rows; a chunk of one row counts as a decode does."""
    return sum(
        len(part.token_ids) + (cost - 1) * len(part.scored_rows) * (len(part.token_ids) > 1)
        for part in output.scheduled
    )


def check(cost: float, budget: int, num_requests: int, seed: int) -> None:
    """Every step within its budget, and every request ends with the scores that are expected of it."""
    run = harness(cost, budget)
    for number in range(num_requests):
        kind, length = (seed + number) % 3, 3 + (seed * 7 + number * 5) % (len(PROMPT) - 3)
        if kind == 0:
            run.submit(PROMPT[:length], max_tokens=4, seed=number, scores_prompt=True)
        elif kind == 1:
            run.submit(PROMPT[:length], max_tokens=1, continuations=CONTINUATIONS)
        else:
            run.submit(PROMPT[:length], max_tokens=4, seed=number)
    for _ in range(400):
        if not run.scheduler.has_work():
            break
        output = run.step()
        rounding = sum(
            bool(part.scored) for part in output.scheduled
        )  # a fraction of a token is given to each
        is_least = all(len(part.scored_rows) <= 1 for part in output.scheduled)
        assert is_least or cost_of(output, cost) < budget + rounding, f"{cost_of(output, cost)} in {budget}"
    run.run_to_end()
    run.check_finished()


@settings(max_examples=25, deadline=None)
@given(
    cost=st.sampled_from((1.0, 1.3, 2.0, 3.5, MAX_SCORED_ROW_COST)),
    budget=st.integers(2, 12),
    num_requests=st.integers(1, 5),
    seed=st.integers(0, 30),
)
def test_no_step_takes_longer_than_its_budget(cost: float, budget: int, num_requests: int, seed: int) -> None:
    check(cost, budget, num_requests, seed)


def lengths(run: CoreHarness) -> list[int]:
    """Rows of each step until the work ends."""
    found = []
    while run.scheduler.has_work():
        found.append(run.step().num_tokens)
    run.check_finished()
    return found


@pytest.mark.parametrize(
    ("cost", "first"), [(None, [8, 5]), (1.0, [8, 5]), (2.0, [4, 4, 4, 1]), (1.5, [5, 5, 3])]
)
def test_a_prompt_that_is_scored_goes_in_smaller_chunks(cost: float | None, first: list[int]) -> None:
    run = harness(cost)
    run.submit(PROMPT, max_tokens=1, scores_prompt=True)
    assert lengths(run)[: len(first)] == first


def test_a_prompt_that_is_not_scored_goes_as_ever() -> None:
    run = harness(3.0)
    run.submit(PROMPT, max_tokens=1)
    assert lengths(run)[:2] == [8, 5]


def test_rows_cost_more_than_a_step_and_are_scored_all_the_same() -> None:
    run = harness(MAX_SCORED_ROW_COST, budget=4)
    run.submit(PROMPT, max_tokens=1, scores_prompt=True)
    assert lengths(run) == [1] * len(PROMPT)


@pytest.mark.parametrize("cost", [0.99, 16.1, float("nan")])
def test_a_cost_out_of_range_is_refused(cost: float) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.scored_row_cost"):
        SchedulerOptions(scored_row_cost=cost)


def _nothing_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepBudget, "_cost", lambda self, num_tokens, num_scored, room: num_tokens)


def _as_many_fit_as_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    fitting = StepBudget._fitting_scored
    monkeypatch.setattr(
        StepBudget,
        "_fitting_scored",
        lambda self, request, remaining, num_unscored: fitting(self, request, 1, num_unscored),
    )


@pytest.mark.parametrize("plant", [_nothing_is_spent, _as_many_fit_as_tokens])
def test_a_planted_mistake_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=r" in "):
        check(3.5, 12, 5, seed=0)
