"""How many drafts are worth a step's rows, and what is learned of each sequence's."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageturner.service.core.drafting import draft_counts as draft_counts_module
from pageturner.service.core.drafting.draft_counts import (
    FIRST_WHOLE_ODDS,
    KEPT_RATE,
    StepCost,
    draft_counts,
    learned_odds,
    recovered_odds,
)

ODDS = st.floats(0.0, 1.0)
FOUND = st.lists(st.tuples(ODDS, st.integers(1, 4)), min_size=1, max_size=3)
ROW_COSTS = st.sampled_from((0.001, 0.02, 0.1, 0.3, 1.0))


def tokens_per_second(found: list[tuple[float, int]], counts: tuple[int, ...], step: StepCost) -> float:
    brought = sum(odds**k for (odds, _), n in zip(found, counts, strict=True) for k in range(1, n + 1))
    return (step.num_samples + brought) / (step.seconds + step.row_cost * sum(counts))


@given(found=FOUND, row_cost=ROW_COSTS, max_rows=st.integers(0, 12))
def test_no_other_choice_yields_more_tokens_a_second(
    found: list[tuple[float, int]], row_cost: float, max_rows: int
) -> None:
    step = StepCost.of(len(found), len(found), row_cost)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_counts_module, "PRICE", 1.0)
        counts = tuple(draft_counts(found, step, max_rows, has_others=False))
    assert sum(counts) <= max_rows
    assert all(0 <= count <= most for count, (_, most) in zip(counts, found, strict=True))
    slowest = min(
        1 + sum(odds**k for k in range(1, count + 1)) for (odds, _), count in zip(found, counts, strict=True)
    )
    seconds = step.seconds + step.row_cost * sum(counts)
    assert slowest / seconds >= KEPT_RATE / step.seconds - 1e-9
    every = itertools.product(*(range(most + 1) for _, most in found))
    best = max(tokens_per_second(found, c, step) for c in every if sum(c) <= max_rows)
    mine = tokens_per_second(found, counts, step)
    if mine < best - 1e-9:  # then some sequence would lose too much by the best choice
        lasts = [
            min(1 + sum(o**k for k in range(1, n + 1)) for (o, _), n in zip(found, c, strict=True))
            / (step.seconds + step.row_cost * sum(c))
            for c in itertools.product(*(range(most + 1) for _, most in found))
            if sum(c) <= max_rows and tokens_per_second(found, c, step) >= best - 1e-9
        ]
        assert all(last < KEPT_RATE / step.seconds + 1e-9 for last in lasts)
    assert mine >= tokens_per_second(found, (0,) * len(found), step) - 1e-9


def test_cheap_rows_are_used_and_dear_ones_are_not() -> None:
    found = [(0.8, 8)]
    assert draft_counts(found, StepCost.of(1, 1, 0.01), 64, has_others=False) == [8]
    assert draft_counts(found, StepCost.of(1, 1, 0.1), 64, has_others=False) == [5]
    assert draft_counts(found, StepCost.of(1, 1, 0.9), 64, has_others=False) == [0]


def test_sequences_without_drafts_keep_most_of_their_rate() -> None:
    step = StepCost.of(2, 2, 0.1)
    (count,) = draft_counts([(1.0, 8)], step, 64, has_others=True)
    assert count == 2
    assert step.seconds / (step.seconds + 0.1 * count) >= KEPT_RATE
    assert draft_counts([(1.0, 8), (1.0, 8)], step, 64, has_others=False) == [8, 8]


def test_a_draft_below_the_least_odds_is_not_worth_its_row() -> None:
    step = StepCost.of(16, 16, 0.15)
    assert draft_counts([(step.least_odds - 0.01, 1)], step, 64, has_others=False) == [0]
    assert draft_counts([(step.least_odds + 0.01, 1)], step, 64, has_others=False) == [1]


@pytest.mark.parametrize(("num_drafts", "num_right", "rises"), [(4, 4, True), (4, 0, False), (1, 1, True)])
def test_odds_follow_what_came_true(num_drafts: int, num_right: int, rises: bool) -> None:
    assert (learned_odds(0.5, num_drafts, num_right) > 0.5) is rises


@given(odds=ODDS, outcomes=st.lists(st.tuples(st.integers(0, 8), st.booleans())))
def test_odds_stay_odds(odds: float, outcomes: list[tuple[int, bool]]) -> None:
    for num_right, is_refuted in outcomes:
        odds = learned_odds(odds, num_right + is_refuted, num_right)
        assert 0.0 <= odds <= 1.0


def test_what_failed_is_given_up_soon_and_tried_again_later() -> None:
    odds, least = FIRST_WHOLE_ODDS, StepCost.of(1, 1, 0.15).least_odds
    num_tries = 0
    while odds > least:
        odds, num_tries = learned_odds(odds, 1, 0), num_tries + 1
    assert num_tries <= 16
    num_tokens = 0
    while odds <= 0.3:
        odds, num_tokens = recovered_odds(odds, FIRST_WHOLE_ODDS), num_tokens + 1
    assert 20 < num_tokens < 200
