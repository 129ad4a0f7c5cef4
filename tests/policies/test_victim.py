"""What sets each victim policy apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.policy_views import LOAD, REQUEST, victim

from pageturner.policies import registry
from pageturner.policies.interfaces import VictimPolicy
from pageturner.policies.victim import (
    FewestOutputs,
    LastArrived,
    LeastComputed,
    LongestRemaining,
    LowestPriority,
    MostExclusiveBlocks,
)
from pageturner.policies.views import VictimView


def rank(policy: VictimPolicy, *candidates: VictimView) -> Sequence[str]:
    return list(policy.rank(candidates, REQUEST, LOAD))


def test_the_last_arrived_yields_even_if_it_is_urgent() -> None:
    old, young = victim("old", arrival_time=1.0), victim("young", arrival_time=2.0, priority=9)
    assert rank(LastArrived(), old, young) == ["young", "old"]


def test_the_least_urgent_yields_and_of_equals_the_youngest() -> None:
    urgent = victim("urgent", priority=1, arrival_time=9.0)
    old, young = victim("old", arrival_time=1.0), victim("young", arrival_time=2.0)
    assert rank(LowestPriority(), old, urgent, young) == ["young", "old", "urgent"]


def test_the_least_computed_yields_within_the_lowest_priority() -> None:
    urgent = victim("urgent", priority=1, num_computed=1)
    much, little = victim("much", num_computed=30), victim("little", num_computed=5)
    assert rank(LeastComputed(), urgent, much, little) == ["little", "much", "urgent"]


def test_the_most_exclusive_blocks_for_a_token_yield_first() -> None:
    shared = victim("shared", num_exclusive_blocks=0, num_recompute_tokens=1)
    dear = victim("dear", num_exclusive_blocks=10, num_recompute_tokens=200)
    cheap = victim("cheap", num_exclusive_blocks=4, num_recompute_tokens=40)
    cached = victim("cached", num_exclusive_blocks=2, num_recompute_tokens=0)
    assert rank(MostExclusiveBlocks(), shared, dear, cheap, cached) == ["cached", "cheap", "dear", "shared"]


def test_the_longest_remaining_yields() -> None:
    nearly = victim("nearly", num_remaining_tokens=3)
    begun = victim("begun", num_remaining_tokens=300)
    urgent = victim("urgent", num_remaining_tokens=999, priority=1)
    assert rank(LongestRemaining(), nearly, urgent, begun) == ["begun", "nearly", "urgent"]


@pytest.mark.parametrize("name", registry.names("victim"))
def test_a_paused_request_yields_before_all_others(name: str) -> None:
    paused = victim(
        "paused",
        priority=9,
        arrival_time=0.0,
        num_computed=40,
        num_exclusive_blocks=0,
        num_remaining_tokens=0,
        is_paused=True,
    )
    other = victim(
        "other", arrival_time=50.0, num_computed=1, num_exclusive_blocks=9, num_remaining_tokens=99
    )
    assert rank(registry.create("victim", name), other, paused) == ["paused", "other"]


@pytest.mark.parametrize("name", registry.names("victim"))
def test_victims_that_tie_are_ordered_by_request_id(name: str) -> None:
    assert rank(registry.create("victim", name), victim("b"), victim("a"), victim("c")) == ["a", "b", "c"]


@pytest.mark.parametrize("name", registry.names("victim"))
def test_among_equals_the_youngest_yields(name: str) -> None:
    views = [victim(str(at), arrival_time=float(at)) for at in (2, 3, 1)]
    assert rank(registry.create("victim", name), *views) == ["3", "2", "1"]


def test_the_fewest_output_tokens_yield_first_and_of_equals_the_longest_prompt() -> None:
    views = {
        "many": victim("many", priority=-1, arrival_time=9.0),
        "short": victim("short", arrival_time=9.0),
        "long": victim("long", priority=5),
    }
    for name, num_outputs, num_prompt in (("many", 8, 900), ("short", 2, 10), ("long", 2, 90)):
        told = replace(views[name].request, num_output_tokens=num_outputs, num_prompt_tokens=num_prompt)
        views[name] = replace(views[name], request=told)
    assert rank(FewestOutputs(), *views.values()) == ["long", "short", "many"]
