"""Beam searches under any moves and any policies come to the answers of a search with unlimited memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import rule, run_state_machine_as_test
from support.at_length import AtLength
from support.core_harness import CoreHarness
from support.drafting_machine import DraftingMachine
from support.scheduler_machine import SchedulerMachine, SearchingMachine, beam_searches, requests
from support.tier_machine import TieredMachine

from pageturner.policies import registry
from pageturner.policies.events import PolicyEvent, StepServed
from pageturner.service.core.sampling_params import BeamSearch

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
def test_answers_scores_and_books_beside_other_features_at_length(
    machine: type[SchedulerMachine], at_length: AtLength
) -> None:
    at_length.run(machine, COMMON, 500, 50)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_answers_scores_and_books_while_beams_are_searched_at_length(at_length: AtLength) -> None:
    at_length.run(SearchingMachine, COMMON, 1500, 50)


def test_policies_are_told_of_every_beam_s_tokens() -> None:
    """One row for all begins a search; then each beam computes one a token, whatever is told."""
    harness = CoreHarness(
        registry.create_set({"queue": "virtual-token-counter"}), num_blocks=40, block_size=2
    )
    served: list[int] = []
    fold = harness.scheduler.policy_host.fold

    def listen(event: PolicyEvent) -> None:
        if isinstance(event, StepServed):
            served.append(sum(share.num_output_tokens for share in event.shares))
        fold(event)

    harness.scheduler.policy_host.fold = listen  # type: ignore[method-assign]
    harness.submit((0, 1, 2), max_tokens=4, beam_search=BeamSearch(3))
    harness.run_to_end()
    assert served == [1, 3, 3, 3]
