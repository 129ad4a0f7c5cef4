"""The general machine can fail: it finds every planted bug, by the invariant that is named for it."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test
from support.bad_machines import PLANTED_BUGS, PlantedBug
from support.bad_scores import SCORING_BUGS
from support.planted_tiers import TIER_BUGS
from support.planted_window_bugs import PLANTED_WINDOW_BUGS

BUDGET = settings(
    max_examples=60,
    stateful_step_count=15,
    deadline=None,
    database=None,
    print_blob=False,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)


MOST_SEARCHES = 33
"""Short ones, each from a seed of its own: 2,000 examples in all."""


def search(bug: PlantedBug) -> None:
    """Raises what the machine finds."""
    for number in range(MOST_SEARCHES):

        @seed(bug.seed + number)
        class Machine(bug.machine):  # type: ignore[name-defined, misc] # its base is a value
            pass

        run_state_machine_as_test(Machine, settings=BUDGET)


ALL_BUGS = PLANTED_BUGS + SCORING_BUGS + TIER_BUGS + PLANTED_WINDOW_BUGS


@pytest.mark.parametrize("bug", ALL_BUGS, ids=lambda bug: bug.name)
def test_planted_bug_is_caught(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bug.owner, bug.method, bug.mistake(getattr(bug.owner, bug.method)))
    monkeypatch.setattr(bug.machine, "favoured_request", bug.favoured_request)
    monkeypatch.setattr(bug.machine, "favoured_policies", bug.favoured_policies)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the match below names the invariant
        search(bug)
    error = caught.value
    assert not isinstance(error, Flaky)
    said = f"{type(error).__name__} {error}"
    assert re.search(rf"\b({bug.caught_by})", said), f"caught, but not by {bug.caught_by}: {said[:300]}"


def test_at_least_ten_bugs_are_planted() -> None:
    assert len(PLANTED_BUGS) >= 10
