"""The search for the highest rate that keeps the objectives, on servers that are functions."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageturner.loadtest.errors import OptionError
from pageturner.loadtest.goodput import Goodput, Objectives
from pageturner.loadtest.knee import MAX_BATCHES, MAX_RATE, KneeOptions, find_knee, wilson

NONE = Objectives()


def sharp(capacity: float, batch: int = 100) -> Callable[[float, int], Goodput]:
    """All requests are good up to the capacity, none beyond."""
    return lambda rate, _: Goodput(NONE, batch if rate <= capacity else 0, batch)


@settings(deadline=None)
@given(capacity=st.floats(0.02, 1000), start=st.floats(0.1, 100), precision=st.sampled_from([0.05, 0.1, 0.5]))
def test_the_knee_of_a_sharp_server_is_found_from_any_start(
    capacity: float, start: float, precision: float
) -> None:
    knee = find_knee(sharp(capacity), KneeOptions(start, precision=precision))
    if capacity < start / 1024:
        assert knee.rate is None
        return
    assert knee.rate is not None
    assert knee.rate <= capacity <= knee.rate * (1 + precision)
    assert knee.is_complete
    assert not any(probe.is_close for probe in knee.probes)
    assert len(knee.probes) < 40


def test_a_server_that_holds_nothing_has_no_knee_and_one_that_holds_all_has_a_bound() -> None:
    never = find_knee(sharp(0.0), KneeOptions())
    assert (never.rate, never.is_complete) == (None, True)
    always = find_knee(sharp(1e9), KneeOptions())
    assert always.rate is not None
    assert MAX_RATE / 2 < always.rate <= MAX_RATE


@settings(deadline=None)
@given(seed=st.integers(0, 1 << 20))
def test_a_noisy_server_is_probed_again_where_it_is_close(seed: int) -> None:
    """Its share of good requests falls from 1 at a rate of 8 to 0 at 12: 0.9 at 8.4."""
    rng = random.Random(seed)
    numbers: list[int] = []

    def measure(rate: float, number: int) -> Goodput:
        numbers.append(number)
        chance = min(1.0, max(0.0, (12 - rate) / 4))
        return Goodput(NONE, sum(rng.random() < chance for _ in range(60)), 60)

    knee = find_knee(measure, KneeOptions(start=1.0, share=0.9, precision=0.05))
    assert numbers == list(range(len(numbers)))
    assert knee.rate is not None
    assert 7.0 < knee.rate < 9.6
    for probe in knee.probes:
        assert probe.low <= probe.share <= probe.high
        assert probe.holds == (probe.share >= 0.9)
        assert probe.num_judged <= 60 * MAX_BATCHES
        if probe.is_close:
            assert probe.num_judged == 60 * MAX_BATCHES
            assert probe.low < 0.9 <= probe.high
        else:
            assert probe.high < 0.9 or probe.low >= 0.9


def test_a_search_that_is_ended_keeps_what_it_found() -> None:
    def measure(rate: float, number: int) -> Goodput | None:
        return None if number == 2 else sharp(100.0)(rate, number)

    knee = find_knee(measure, KneeOptions())
    assert ([probe.rate for probe in knee.probes], knee.is_complete, knee.rate) == ([1, 2], False, 2)
    assert knee.to_plain()["probes"][0]["share"] == 1.0


def test_a_batch_lasts_however_high_the_rate() -> None:
    options = KneeOptions(seconds=10.0)
    assert [options.batch(rate, 60) for rate in (0.5, 6.0, 6.1, 1000.0)] == [60, 60, 61, 10_000]


def test_the_interval_is_wilsons() -> None:
    """Figures of Agresti and Coull, 1998: 9 of 10 is 0.596 to 0.982, none of 20 is 0 to 0.161."""
    assert wilson(9, 10) == pytest.approx((0.596, 0.982), abs=1e-3)
    assert wilson(0, 20) == pytest.approx((0.0, 0.161), abs=1e-3)
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"start": 0.0}, "rate"),
        ({"start": float("nan")}, "rate"),
        ({"share": 1.0}, "knee-share"),
        ({"precision": 0.0}, "knee-precision"),
        ({"seconds": -1.0}, "knee-seconds"),
    ],
)
def test_options_that_make_no_sense_name_their_flag(options: dict[str, float], option: str) -> None:
    with pytest.raises(OptionError) as caught:
        KneeOptions(**options)
    assert caught.value.option == option
