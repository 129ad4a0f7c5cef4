"""Beam searches under any moves and any policies come to the answers of a search with unlimited memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import rule, run_state_machine_as_test
from support.drafting_machine import DraftingMachine
from support.scheduler_machine import SchedulerMachine, SearchingMachine, beam_searches, requests
from support.tier_machine import TieredMachine

COMMON = settings(deadline=None, suppress_health_check=list(HealthCheck))


class SearchesBesideDrafts(DraftingMachine):
    """Sequences with drafts in the steps of those that search."""

    @rule(wanted=requests(), search=beam_searches())
    def search(self, wanted: dict[str, Any], search: dict[str, Any]) -> None:
        self._submit(wanted | search)


class SearchesOverTiers(TieredMachine):
    """Blocks that beams share come back from the host or from disk."""

    @rule(wanted=requests(), search=beam_searches())
    def search(self, wanted: dict[str, Any], search: dict[str, Any]) -> None:
        self._submit(wanted | search)


def test_answers_scores_and_books_while_beams_are_searched() -> None:
    run_state_machine_as_test(
        SearchingMachine, settings=settings(COMMON, max_examples=25, stateful_step_count=20)
    )


@pytest.mark.parametrize("machine", [SearchesBesideDrafts, SearchesOverTiers])
def test_answers_scores_and_books_beside_other_features(machine: type[SchedulerMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(COMMON, max_examples=8, stateful_step_count=20))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [SearchesBesideDrafts, SearchesOverTiers])
def test_answers_scores_and_books_beside_other_features_at_length(machine: type[SchedulerMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(COMMON, max_examples=500, stateful_step_count=50))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_answers_scores_and_books_while_beams_are_searched_at_length() -> None:
    run_state_machine_as_test(
        SearchingMachine, settings=settings(COMMON, max_examples=1500, stateful_step_count=50)
    )
