"""Beam searches under any moves and any policies come to the answers of a search with unlimited memory."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from support.scheduler_machine import SearchingMachine

COMMON = settings(deadline=None, suppress_health_check=list(HealthCheck))


def test_answers_scores_and_books_while_beams_are_searched() -> None:
    run_state_machine_as_test(
        SearchingMachine, settings=settings(COMMON, max_examples=40, stateful_step_count=20)
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_answers_scores_and_books_while_beams_are_searched_at_length() -> None:
    run_state_machine_as_test(
        SearchingMachine, settings=settings(COMMON, max_examples=1500, stateful_step_count=50)
    )
