"""The headline property, and all invariants of the design, under any moves and any policies."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from support.scheduler_machine import SchedulerMachine, SwappingMachine

COMMON = settings(deadline=None, suppress_health_check=list(HealthCheck))


def test_tokens_and_books_are_those_of_unlimited_memory() -> None:
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(COMMON, max_examples=120, stateful_step_count=20)
    )


def test_tokens_and_books_while_policies_are_swapped() -> None:
    run_state_machine_as_test(
        SwappingMachine, settings=settings(COMMON, max_examples=80, stateful_step_count=20)
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_tokens_and_books_at_length() -> None:
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(COMMON, max_examples=3000, stateful_step_count=50)
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_tokens_and_books_while_policies_are_swapped_at_length() -> None:
    run_state_machine_as_test(
        SwappingMachine, settings=settings(COMMON, max_examples=2000, stateful_step_count=50)
    )
