"""What sets each queue policy apart, and the bounds that its docstring promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.policy_views import LOAD, load_views, request, request_views

from pageturner.policies.errors import PolicyOptionError
from pageturner.policies.interfaces import KeyChange, QueuePolicy
from pageturner.policies.queue import (
    EarliestDeadlineFirst,
    Fcfs,
    HighestResponseRatioNext,
    LongestPrefixMatch,
    MultiLevelFeedback,
    PriorityWithAging,
    ShortestJobFirst,
    VirtualTokenCounter,
)
from pageturner.policies.service_counters import parse_weights
from pageturner.policies.views import LoadView, RequestView


def order(policy: QueuePolicy, *requests: RequestView, now: float = 100.0) -> list[str]:
    load = replace(LOAD, now=now)
    return [r.request_id for r in sorted(requests, key=lambda view: policy.key(view, load))]


def test_fcfs_orders_by_arrival_only() -> None:
    late_but_urgent = request("late", arrival_time=2.0, priority=9, num_cached_tokens=32, deadline=3.0)
    assert order(Fcfs(), late_but_urgent, request("early", arrival_time=1.0)) == ["early", "late"]


def test_priority_puts_the_urgent_first_until_the_other_has_waited_long_enough() -> None:
    policy = PriorityWithAging(aging_seconds=10.0)
    patient = request("patient", arrival_time=0.0, priority=1)
    assert order(policy, patient, request("urgent", arrival_time=19.0, priority=3)) == ["urgent", "patient"]
    assert order(policy, patient, request("urgent", arrival_time=21.0, priority=3)) == ["patient", "urgent"]


def test_priority_is_fcfs_among_equals() -> None:
    first, second = (request(name, arrival_time=at, priority=5) for name, at in (("a", 1.0), ("b", 2.0)))
    assert order(PriorityWithAging(), second, first) == ["a", "b"]


@given(first=request_views(), gap=st.floats(0, 1e6), levels=st.integers(0, 1000), load=load_views())
def test_aging_bounds_how_late_an_urgent_request_may_come_and_still_overtake(
    first: RequestView, gap: float, levels: int, load: LoadView
) -> None:
    policy = PriorityWithAging(aging_seconds=7.0)
    first = replace(first, priority=0, arrival_time=1.0)
    urgent = replace(first, priority=levels, arrival_time=1.0 + gap)
    overtakes = policy.key(urgent, load) < policy.key(first, load)
    assert overtakes == (urgent.arrival_time - levels * 7.0 < first.arrival_time)


def test_the_shortest_job_is_the_one_with_least_left_to_generate() -> None:
    policy = ShortestJobFirst(prefill_weight=0.0)
    long = request("long", max_output_tokens=100, num_output_tokens=80)  # 20 to go
    short = request("short", max_output_tokens=30, num_output_tokens=0)
    assert order(policy, short, long) == ["long", "short"]
    twins = request("twins", max_output_tokens=15, num_output_tokens=0, num_sequences=2)
    assert order(policy, twins, long) == ["long", "twins"]


def test_the_prompt_counts_by_its_weight() -> None:
    wordy = request("wordy", num_uncomputed_tokens=1000, num_tokens=1000, max_output_tokens=10)
    brief = request("brief", num_uncomputed_tokens=10, num_tokens=10, max_output_tokens=40)
    assert order(ShortestJobFirst(prefill_weight=0.0), wordy, brief) == ["wordy", "brief"]
    assert order(ShortestJobFirst(prefill_weight=0.1), wordy, brief) == ["brief", "wordy"]


def test_the_longest_cached_prefix_goes_first_up_to_the_cap() -> None:
    policy = LongestPrefixMatch(cap_tokens=1000, aging_tokens_per_second=100.0)
    hit, miss = request("hit", arrival_time=5.0, num_cached_tokens=600), request("miss", arrival_time=0.0)
    assert order(policy, miss, hit) == ["hit", "miss"]
    assert order(LongestPrefixMatch(cap_tokens=400, aging_tokens_per_second=100.0), miss, hit) == [
        "miss",
        "hit",
    ]


@given(first=request_views(), second=request_views(), load=load_views())
def test_no_request_is_overtaken_beyond_the_cap(
    first: RequestView, second: RequestView, load: LoadView
) -> None:
    policy = LongestPrefixMatch(cap_tokens=1024, aging_tokens_per_second=64.0)
    late = replace(second, arrival_time=first.arrival_time + 1024 / 64.0 + 1e-3)
    assert policy.key(first, load) < policy.key(late, load)


def test_the_response_ratio_favours_the_short_and_then_the_waiting() -> None:
    policy = HighestResponseRatioNext(seconds_per_output_token=0.1, seconds_per_prompt_token=0.0)
    long = request("long", arrival_time=0.0, num_output_tokens=0, max_output_tokens=1000)  # 100 s of work
    short = request("short", arrival_time=90.0, num_output_tokens=0, max_output_tokens=10)  # 1 s of work
    assert order(policy, long, short, now=100.0) == ["short", "long"]  # ratios 10 and 1
    # A short one that has just come has waited for nothing yet: the long one is not passed for ever.
    assert order(policy, long, replace(short, arrival_time=99.9), now=100.0) == ["long", "short"]


def test_a_request_with_nothing_left_to_generate_has_a_response_ratio() -> None:
    done = request("done", max_output_tokens=8, num_output_tokens=8, num_uncomputed_tokens=0)
    assert order(HighestResponseRatioNext(), request("other"), done) == ["done", "other"]


@given(request_views(), request_views(), load_views())
def test_equal_work_is_served_in_order_of_arrival(a: RequestView, b: RequestView, load: LoadView) -> None:
    policy = HighestResponseRatioNext()
    early, late = sorted((a.arrival_time, b.arrival_time))
    first = policy.key(replace(a, arrival_time=early), load)
    assert first <= policy.key(replace(a, arrival_time=late), load)


def test_the_nearest_deadline_goes_first_and_none_counts_as_a_late_one() -> None:
    policy = EarliestDeadlineFirst(default_seconds=60.0)
    soon, later = request("soon", deadline=50.0, arrival_time=9.0), request("later", deadline=90.0)
    assert order(policy, later, soon) == ["soon", "later"]
    assert order(policy, later, request("none", arrival_time=0.0)) == ["none", "later"]
    assert order(policy, later, request("none", arrival_time=31.0)) == ["later", "none"]


def test_some_keys_need_sorting_again_with_time() -> None:
    policies = (Fcfs, PriorityWithAging, EarliestDeadlineFirst, ShortestJobFirst, LongestPrefixMatch)
    assert [policy.key_change for policy in policies] == [KeyChange.NEVER] * 3 + [KeyChange.WITH_REQUEST] * 2
    for ageing in (HighestResponseRatioNext, MultiLevelFeedback, VirtualTokenCounter):
        assert ageing.key_change is KeyChange.WITH_TIME


def test_levels_of_feedback_cost_twice_the_one_above() -> None:
    policy = MultiLevelFeedback(quantum_tokens=10, num_levels=4, prompt_weight=0)
    now = replace(LOAD, now=0.0)
    levels = [policy.key(request(num_output_tokens=n), now)[0] for n in (0, 9, 10, 29, 30, 69, 70, 9999)]
    assert levels == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_long_prompt_joins_further_down() -> None:
    policy = MultiLevelFeedback(quantum_tokens=10, prompt_weight=0.1)
    short, long = request("short", arrival_time=9.0), request("long", num_prompt_tokens=1000)
    assert order(policy, long, short, now=10.0) == ["short", "long"]


def test_each_boost_lifts_one_level_and_none_beyond_the_first() -> None:
    policy = MultiLevelFeedback(quantum_tokens=10, prompt_weight=0, boost_seconds=30.0)
    low = request("low", num_output_tokens=35, arrival_time=0.0)  # level 2
    fresh = request("fresh", num_output_tokens=0, arrival_time=50.0)
    assert order(policy, low, fresh, now=59.9) == ["fresh", "low"]
    assert order(policy, low, fresh, now=60.0) == ["low", "fresh"]
    assert policy.key(low, replace(LOAD, now=1e6)) == (0, 0.0)


@pytest.mark.parametrize("weights", ["a", "a=", "a=0", "a=-1", "a=nan", "a=inf", "a=1,b"])
def test_weights_that_cannot_be_read_are_refused(weights: str) -> None:
    with pytest.raises(PolicyOptionError, match="tenant_weights"):
        VirtualTokenCounter(tenant_weights=weights)


def test_weights_are_read_by_tenant() -> None:
    assert parse_weights(" gold = 4, a=b=0.5,=2,") == {"gold": 4.0, "a=b": 0.5, "": 2.0}
