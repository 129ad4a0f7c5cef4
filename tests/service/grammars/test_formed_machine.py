"""Answers of a form, under any moves and any policies: they parse, and equal those of unlimited memory."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from support.at_length import AtLength
from support.formed_machine import FormedDraftingMachine, FormedMachine, FormedSearchingMachine

COMMON = settings(deadline=None, suppress_health_check=list(HealthCheck))


def test_answers_of_a_form_parse_and_equal_those_of_unlimited_memory() -> None:
    run_state_machine_as_test(
        FormedMachine, settings=settings(COMMON, max_examples=16, stateful_step_count=12)
    )


def test_answers_of_a_form_with_drafts_behind_them() -> None:
    run_state_machine_as_test(
        FormedDraftingMachine, settings=settings(COMMON, max_examples=9, stateful_step_count=10)
    )


def test_searches_among_the_texts_of_a_form_equal_those_of_unlimited_memory() -> None:
    run_state_machine_as_test(
        FormedSearchingMachine, settings=settings(COMMON, max_examples=8, stateful_step_count=10)
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_searches_among_the_texts_of_a_form_at_length(at_length: AtLength) -> None:
    at_length.run(FormedSearchingMachine, COMMON, 1000, 40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_answers_of_a_form_with_drafts_behind_them_at_length(at_length: AtLength) -> None:
    at_length.run(FormedDraftingMachine, COMMON, 1500, 40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_answers_of_a_form_at_length(at_length: AtLength) -> None:
    at_length.run(FormedMachine, COMMON, 2000, 40)
