"""What is sent is decided by the seed alone."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageturner.loadtest.errors import OptionError
from pageturner.loadtest.workload import Lengths, LoadtestWorkload, Mix, arrivals, plan_requests
from pageturner.loadtest.workload.arrivals import RandomArrivals

WORKLOAD = LoadtestWorkload(
    num_requests=50,
    prompt_lengths=Lengths(20, 30),
    output_lengths=Lengths(5, 9),
    token_ids=tuple(range(10, 1000)),
    seed=7,
    shared_prefix_tokens=16,
    arrivals=RandomArrivals(4.0),
    priorities=Mix((0, 5), (3.0, 1.0)),
    tenants=Mix(("alice", "bob"), (1.0, 1.0)),
)


def test_the_same_seed_sends_the_same_and_another_seed_does_not() -> None:
    assert list(plan_requests(WORKLOAD)) == list(plan_requests(WORKLOAD))
    other = dataclasses.replace(WORKLOAD, seed=8)
    assert {r.prompt_token_ids for r in plan_requests(WORKLOAD)}.isdisjoint(
        r.prompt_token_ids for r in plan_requests(other)
    )
    assert list(arrivals(WORKLOAD)) != list(arrivals(other))


@given(num_parts=st.integers(1, 7))
def test_processes_share_the_requests_without_changing_them(num_parts: int) -> None:
    shares = [request for part in range(num_parts) for request in plan_requests(WORKLOAD, part, num_parts)]
    assert sorted(shares, key=lambda request: request.index) == list(plan_requests(WORKLOAD))


def test_lengths_prefix_and_vocabulary_are_kept() -> None:
    planned = list(plan_requests(WORKLOAD))
    assert {len(request.prompt_token_ids) for request in planned} == set(range(20, 31))
    assert {request.output_tokens for request in planned} == set(range(5, 10))
    assert len({request.prompt_token_ids[:16] for request in planned}) == 1
    assert len({request.prompt_token_ids[16:] for request in planned}) == 50
    assert {token_id for request in planned for token_id in request.prompt_token_ids} <= set(range(10, 1000))


def test_mixes_are_drawn_by_weight() -> None:
    planned = list(plan_requests(dataclasses.replace(WORKLOAD, num_requests=2000)))
    urgent = Counter(request.priority for request in planned)[5]
    assert 400 < urgent < 600  # 500 expected, 5 standard deviations are 97
    assert {request.tenant for request in planned} == {"alice", "bob"}


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    times = list(arrivals(dataclasses.replace(WORKLOAD, num_requests=4000, arrivals=RandomArrivals(10.0))))
    assert times == sorted(times)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.08)  # 5 standard errors
    # Exponential gaps: the deviation is the mean, and e^-1 of them exceed it. Even gaps would have none.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(0.1, rel=0.12)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.04)


def test_a_closed_loop_has_no_times() -> None:
    assert set(arrivals(dataclasses.replace(WORKLOAD, arrivals=None))) == {0.0}


def test_lengths_and_mixes_are_read_from_flags() -> None:
    assert Lengths.parse("prompt-tokens", "128") == Lengths(128, 128)
    assert Lengths.parse("prompt-tokens", "64-256") == Lengths(64, 256)
    assert Mix.parse("tenants", "alice:3,bob") == Mix(("alice", "bob"), (3.0, 1.0))
    assert Mix.parse_integers("priorities", "0:9,-5:0.5") == Mix((0, -5), (9.0, 0.5))
    assert str(Mix.parse("tenants", "alice:3,bob")) == "alice:3,bob:1"
    assert str(Lengths(64, 256)) == "64-256"


@pytest.mark.parametrize("text", ["", "x", "0", "5-4", "-3", "1-2-3", "1.5"])
def test_bad_lengths_name_their_flag(text: str) -> None:
    with pytest.raises(OptionError, match="--prompt-tokens"):
        Lengths.parse("prompt-tokens", text)


@pytest.mark.parametrize("text", ["a:1", "1:x", "1:0", "1:-1", "1:inf", "1:nan", "", "3000000000"])
def test_bad_mixes_name_their_flag(text: str) -> None:
    with pytest.raises(OptionError, match="--priorities"):
        Mix.parse_integers("priorities", text)


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"num_requests": 0}, "requests"),
        ({"shared_prefix_tokens": 21}, "shared-prefix-tokens"),
        ({"shared_prefix_tokens": -1}, "shared-prefix-tokens"),
        ({"think_seconds": -1.0}, "think-seconds"),
    ],
)
def test_a_workload_that_makes_no_sense_names_the_flag(change: dict[str, float], option: str) -> None:
    with pytest.raises(OptionError) as caught:
        dataclasses.replace(WORKLOAD, **change)  # type: ignore[arg-type]  # fields by name
    assert caught.value.option == option
