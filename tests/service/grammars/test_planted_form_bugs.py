"""The machine of formed answers can fail: it finds each mistake planted in masks, places and ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from support.formed_machine import FormedMachine, FormedSearchingMachine

from pageturner.service.core.beam_search import Selection
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.scheduling import beams
from pageturner.service.grammars import step_masks
from pageturner.service.grammars.compiler import Allowed, Position
from pageturner.service.grammars.step_masks import StepMasks

BUDGET = settings(
    max_examples=12,
    stateful_step_count=8,
    deadline=None,
    database=None,
    print_blob=False,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
MOST_SEARCHES = 20


def _behind_the_newest_token(original: Any) -> Any:
    return lambda self, wanted, outputs: original(
        self, wanted, outputs.log.view(outputs.start, max(outputs.start, outputs._stop - 1))
    )


def _one_place_for_all_choices(original: Any) -> Any:
    places: dict[object, Position] = {}

    def up_to(self: StepMasks, wanted: Any, outputs: Any) -> Position:
        kept = places.setdefault(wanted, self._grammars.compile(wanted).start())
        kept.take(outputs[kept.num_tokens :])
        return kept

    return up_to


def _ends_anywhere(original: Any) -> Any:
    return lambda allowed, row: original(Allowed(allowed.words, True), row)


def _no_ends(original: Any) -> Any:
    return property(lambda self: False)


def _of_penalties_alone(original: Any) -> Any:
    return SamplingParams.has_penalties


PLANTED: dict[str, tuple[Any, str, Callable[[Any], Any], str]] = {
    "a place one token behind": (StepMasks, "_up_to", _behind_the_newest_token, "tokens|form"),
    "one place for all choices": (StepMasks, "_up_to", _one_place_for_all_choices, "tokens|form"),
    "an end anywhere": (step_masks, "with_ends", _ends_anywhere, "tokens|form"),
    "an end is any token to the scheduler": (
        NewRequest,
        "has_timely_ends",
        _no_ends,
        "tokens|form",
    ),
    "no history": (
        SamplingParams,
        "needs_history",
        lambda original: SamplingParams.has_penalties,
        "tokens|form",
    ),
}


def _no_copy(original: Any) -> Any:
    return lambda self: self


def _idle_places_count(original: Any) -> Any:
    def select(*given: Any, **options: Any) -> Selection:
        selection: Selection = original(*given, **options)
        counted = tuple(replace(each, score=selection.continued[0].score) for each in selection.continued)
        return replace(selection, continued=counted)

    return select


PLANTED_IN_SEARCHES: dict[str, tuple[Any, str, Callable[[Any], Any], str]] = {
    "beams of one parent share its place": (Position, "copy", _no_copy, "tokens|form|draft"),
    "a place without a beam counts as one": (
        beams,
        "select",
        _idle_places_count,
        "tokens|terminal|list index",
    ),
    "an end is any token to the search": (NewRequest, "has_timely_ends", _no_ends, "tokens|terminal|form"),
}


def search(machine: type[FormedMachine]) -> None:
    """Raises what the machine finds."""
    for number in range(MOST_SEARCHES):

        @seed(number)
        class Machine(machine):  # type: ignore[valid-type, misc] # its base is a value
            pass

        run_state_machine_as_test(Machine, settings=BUDGET)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, mistake, caught_by = PLANTED[name]
    monkeypatch.setattr(owner, method, mistake(getattr(owner, method)))
    with pytest.raises(Exception, match=rf"\b({caught_by})"):
        search(FormedMachine)


@pytest.mark.parametrize("name", PLANTED_IN_SEARCHES)
def test_a_mistake_planted_in_searches_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, mistake, caught_by = PLANTED_IN_SEARCHES[name]
    monkeypatch.setattr(owner, method, mistake(getattr(owner, method)))
    with pytest.raises(Exception, match=rf"\b({caught_by})"):
        search(FormedSearchingMachine)
