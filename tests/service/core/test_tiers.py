"""The headline property with tiers behind the prefix cache, and that its proof can fail."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from support.at_length import AtLength
from support.tier_machine import DraftingDiskMachine, HandingOverMachine, TieredMachine

COMMON = settings(deadline=None, suppress_health_check=list(HealthCheck))

MOST_ROUNDS = 5
"""Of random moves, until blocks came back from each tier: mostly one round."""


def test_tokens_and_books_with_tiers() -> None:
    TieredMachine.totals.clear()
    for _ in range(MOST_ROUNDS):
        run_state_machine_as_test(
            TieredMachine, settings=settings(COMMON, max_examples=60, stateful_step_count=20)
        )
        if all(TieredMachine.totals.values()):
            return
    raise AssertionError(f"from some tier nothing came back: {TieredMachine.totals}")


def test_tokens_and_books_with_all_on_disk_and_drafts() -> None:
    run_state_machine_as_test(
        DraftingDiskMachine, settings=settings(COMMON, max_examples=30, stateful_step_count=20)
    )


def test_tokens_and_books_where_requests_hand_over_their_blocks() -> None:
    run_state_machine_as_test(
        HandingOverMachine, settings=settings(COMMON, max_examples=30, stateful_step_count=20)
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_tokens_and_books_where_requests_hand_over_their_blocks_at_length(at_length: AtLength) -> None:
    at_length.run(HandingOverMachine, COMMON, 2000, 50)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_tokens_and_books_with_tiers_at_length(at_length: AtLength) -> None:
    at_length.run(TieredMachine, COMMON, 2000, 50)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_tokens_and_books_with_all_on_disk_and_drafts_at_length(at_length: AtLength) -> None:
    at_length.run(DraftingDiskMachine, COMMON, 2000, 50)
