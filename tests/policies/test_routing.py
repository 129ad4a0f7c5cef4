"""Routing policies: what each heeds, how far a choice may be from the least loaded, who moves on a change."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageturner.policies import registry
from pageturner.policies.errors import UnknownAxisError
from pageturner.policies.fleet import Affinity, Digest, ListedFleet, ReplicaView, RoutedRequest
from pageturner.policies.routing import LeastTokens, PowerOfTwo, PrefixAware, RoundRobin, SessionAffinity

CHAIN: tuple[Digest, ...] = tuple(f"block {number}".encode() for number in range(8))


def never(_: int) -> int:
    raise AssertionError("chance was asked where there is nothing to choose")


def fleet_of(loads: dict[str, float], held: dict[str, int] | None = None) -> ListedFleet:
    """held: by replica, how many digests of CHAIN."""
    views = tuple(ReplicaView(name, int(load), 0, 1.0, load) for name, load in loads.items())
    return ListedFleet(views, {name: frozenset(CHAIN[:count]) for name, count in (held or {}).items()})


def request(number: int = 0, num_prompt_tokens: int = 128, session: str = "") -> RoutedRequest:
    return RoutedRequest(number, num_prompt_tokens, CHAIN, 16, session)


def test_round_robin_goes_round() -> None:
    fleet = fleet_of({"a": 9.0, "b": 0.0, "c": 5.0})
    chosen = [RoundRobin().route(request(number), fleet, never)[0] for number in range(6)]
    assert chosen == ["a", "b", "c", "a", "b", "c"]


def test_least_tokens_takes_the_first_of_the_least_loaded() -> None:
    assert LeastTokens().route(request(), fleet_of({"a": 9, "b": 3, "c": 3}), never) == ("b",)


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_power_of_two_takes_the_less_loaded_of_two_different_replicas(size: int) -> None:
    fleet = fleet_of({f"r{number}": float(number) for number in range(size)})
    rng = Random(5)
    chosen = Counter(PowerOfTwo().route(request(), fleet, rng.randrange)[0] for _ in range(4000))
    assert size == 1 or f"r{size - 1}" not in chosen, "the most loaded one loses to any other"
    # The less loaded of two of n is the k-th least with probability 2 (n - 1 - k) / (n (n - 1)).
    if size > 1:
        assert chosen["r0"] / 4000 == pytest.approx(2 / size, abs=0.03)


def test_prefix_aware_takes_the_longest_match() -> None:
    fleet = fleet_of({"a": 0.0, "b": 100.0, "c": 50.0}, {"b": 6, "c": 2})
    assert PrefixAware().route(request(), fleet, never) == ("b", "a")


def test_prefix_aware_leaves_a_holder_that_is_too_busy_for_what_it_saves() -> None:
    policy = PrefixAware(max_imbalance=1.5, saved_weight=2.0)
    bound = 1.5 * 100 + 2.0 * 6 * 16
    for load, expected in ((bound, "b"), (bound + 1, "a")):
        fleet = fleet_of({"a": 100.0, "b": load}, {"b": 6})
        assert policy.route(request(), fleet, never)[0] == expected


def test_prefix_aware_heeds_no_match_that_is_small_beside_the_prompt() -> None:
    fleet = fleet_of({"a": 0.0, "b": 1.0}, {"b": 1})
    assert PrefixAware(min_match=0.1).route(request(num_prompt_tokens=160), fleet, never)[0] == "b"
    assert PrefixAware(min_match=0.1).route(request(num_prompt_tokens=161), fleet, never)[0] == "a"


def test_prefix_aware_draws_where_nothing_is_held_if_it_is_told_to() -> None:
    fleet = fleet_of({f"r{number}": float(number) for number in range(20)})
    rng = Random(1)
    alone = {PrefixAware().route(request(), fleet, never)[0] for _ in range(100)}
    many = {PrefixAware(fallback_choices=2).route(request(), fleet, rng.randrange)[0] for _ in range(100)}
    assert alone == {"r0"}
    assert len(many) > 10
    assert "r19" not in many


def test_prefix_aware_takes_the_least_loaded_if_it_holds_as_much_as_any() -> None:
    fleet = fleet_of({f"r{number}": float(number) for number in range(20)}, {f"r{n}": 8 for n in range(20)})
    assert PrefixAware().route(request(), fleet, never) == ("r0",)


def test_prefix_aware_draws_among_many_holders() -> None:
    fleet = fleet_of(
        {f"r{number}": float(number) for number in range(20)}, {f"r{n}": 8 for n in range(1, 20)}
    )
    rng = Random(1)
    chosen = Counter(PrefixAware().route(request(), fleet, rng.randrange)[0] for _ in range(500))
    assert len(chosen) > 10
    assert "r19" not in chosen


@given(
    loads=st.lists(st.floats(0, 1e6), min_size=1, max_size=8),
    held=st.lists(st.integers(0, 8), min_size=8, max_size=8),
    max_imbalance=st.floats(1, 4),
    saved_weight=st.floats(0, 8),
    num_prompt=st.integers(1, 4096),
    seed=st.integers(0, 99),
)
def test_no_choice_is_further_from_the_least_loaded_than_the_bound(
    loads: list[float],
    held: list[int],
    max_imbalance: float,
    saved_weight: float,
    num_prompt: int,
    seed: int,
) -> None:
    fleet = fleet_of(
        {f"r{n}": load for n, load in enumerate(loads)}, {f"r{n}": held[n] for n in range(len(loads))}
    )
    policy = PrefixAware(max_imbalance, saved_weight)
    asked = request(num_prompt_tokens=num_prompt)
    chosen = fleet.find(policy.route(asked, fleet, Random(seed).randrange)[0])
    saved = asked.cached_tokens(fleet.num_held(chosen.replica_id, CHAIN))
    assert chosen.load <= max_imbalance * fleet.least_loaded().load + saved_weight * saved


def test_a_session_stays_while_its_replica_is_not_overloaded() -> None:
    policy = SessionAffinity(max_imbalance=2.0, slack_tokens=100)
    own, second, _ = fleet_of(dict.fromkeys("abcd", 0.0)).by_affinity("chat 7", 3)
    even = fleet_of(dict.fromkeys("abcd", 1000.0))
    assert policy.route(request(session="chat 7"), even, never)[0] == own
    # One that has more than twice the mean and 100: (3 x 1000 + x) / 4 x 2 + 100 = x where x = 3200.
    for load, expected in ((3200.0, own), (3201.0, second)):
        loads = {**dict.fromkeys("abcd", 1000.0), own: load}
        assert policy.route(request(session="chat 7"), fleet_of(loads), never)[0] == expected


def test_a_request_of_no_session_goes_to_the_least_loaded() -> None:
    assert SessionAffinity().route(request(), fleet_of({"a": 2, "b": 1}), never) == ("b",)


def test_few_sessions_move_when_a_replica_comes_or_goes() -> None:
    """Those of the one that left, and those that the new one takes: a share of 1/n; no other."""
    names = [(f"replica-{number}", 1.0) for number in range(10)]
    before, less, more = Affinity(names), Affinity(names[:-1]), Affinity([*names, ("new", 1.0)])
    keys = [f"session {number}" for number in range(5000)]
    for key in keys:
        (own,) = before.first(key, 1)
        assert own == "replica-9" or less.first(key, 1) == (own,)
        assert more.first(key, 1)[0] in (own, "new")
    moved = sum(more.first(key, 1) == ("new",) for key in keys)
    assert moved / len(keys) == pytest.approx(1 / 11, abs=0.02)


def test_affinity_gives_each_replica_its_share_by_capacity() -> None:
    """Chi-square of 20,000 keys over 9 replicas, one of capacity 4; 26.1 is its 99.9 % quantile."""
    replicas = [(f"r{number}", 4.0 if number == 3 else 1.0) for number in range(9)]
    affinity = Affinity(replicas)
    found = Counter(affinity.first(f"{number}", 1)[0] for number in range(20_000))
    expected = {name: 20_000 * capacity / 12 for name, capacity in replicas}
    assert sum((found[name] - count) ** 2 / count for name, count in expected.items()) < 26.1


def test_the_order_of_affinity_is_one_order() -> None:
    affinity = Affinity([(name, 1.0) for name in "abcdef"])
    whole = affinity.first("some key", 99)
    assert sorted(whole) == list("abcdef")
    assert all(affinity.first("some key", count) == whole[:count] for count in range(1, 7))
    assert affinity.first("\ud800", 1) == affinity.first("\ud800", 1), "a key may be no text at all"


def test_the_axis_is_not_one_of_a_server() -> None:
    with pytest.raises(UnknownAxisError, match="no policy axis 'routing'"):
        registry.create_set({"routing": "round-robin"})
    assert registry.create("routing", "prefix-aware", {"choices": 3}) == PrefixAware(choices=3)
