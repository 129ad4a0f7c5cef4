"""Arrivals have the rates, the burstiness and the ramps that were asked for."""

from __future__ import annotations

import math
import random
import statistics
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageturner.loadtest.errors import OptionError
from pageturner.loadtest.workload.arrivals import RandomArrivals, TraceArrivals

COUNT = 4000


def gaps_of(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *times])]


@settings(max_examples=30, deadline=None)
@given(rate=st.floats(0.01, 1e4), burstiness=st.floats(0.2, 20), seed=st.integers(0, 1 << 30))
def test_gaps_have_the_mean_and_the_burstiness_asked_for(rate: float, burstiness: float, seed: int) -> None:
    gaps = gaps_of(RandomArrivals(rate, burstiness).times(COUNT, random.Random(seed)))
    assert min(gaps) >= 0
    deviation = 1 / math.sqrt(burstiness)  # of a gap whose mean is 1
    assert statistics.fmean(gaps) * rate == pytest.approx(1, abs=6 * deviation / math.sqrt(COUNT))
    # Var of the sample's squared coefficient of variation, by its kurtosis: (2 k^2 + 6 / b) / n at most.
    tolerance = 6 * deviation**2 * math.sqrt((2 + 6 / burstiness) / COUNT) + 0.02 * deviation**2
    assert statistics.pvariance(gaps) * rate**2 == pytest.approx(1 / burstiness, abs=tolerance)


@settings(deadline=None)
@given(rate=st.floats(0.01, 1e4), count=st.integers(1, 200))
def test_a_constant_rate_is_a_metronome(rate: float, count: int) -> None:
    times = RandomArrivals(rate, math.inf).times(count, random.Random(0))
    assert times == pytest.approx([(index + 1) / rate for index in range(count)])


@settings(deadline=None)
@given(start=st.floats(0.1, 100), end=st.floats(0.1, 100), count=st.integers(2, 400))
def test_a_ramp_goes_from_one_rate_to_the_other(start: float, end: float, count: int) -> None:
    """The area under a straight line from `start` to `end` is the number that came."""
    times = RandomArrivals(start, math.inf, end).times(count, random.Random(0))
    assert times == sorted(times)
    seconds = 2 * count / (start + end)
    assert times[-1] == pytest.approx(seconds)
    for number, at in enumerate(times, 1):
        came = start * at + (end - start) * at * at / (2 * seconds)
        assert came == pytest.approx(number, rel=1e-6, abs=1e-6)


def test_random_arrivals_ramp_too() -> None:
    times = RandomArrivals(2.0, 1.0, 18.0).times(COUNT, random.Random(1))
    middle = times[-1] / 2
    first_half = sum(at < middle for at in times)
    # Rates of 2 to 10, then of 10 to 18: three tenths come in the first half.
    assert first_half / COUNT == pytest.approx(0.3, abs=0.03)


def test_arrivals_past_the_ramp_come_at_its_end_rate() -> None:
    arrivals = RandomArrivals(1.0, 1.0, 4.0)
    assert arrivals._when(10, 10) == pytest.approx(4.0)
    assert arrivals._when(12, 10) == pytest.approx(4.5)


def test_a_trace_gives_its_times_at_the_speed() -> None:
    arrivals = TraceArrivals("day", (0.0, 3.0, 4.0), speed=2.0)
    assert arrivals.times(2, random.Random(0)) == [0.0, 1.5]
    with pytest.raises(OptionError, match="day has 3 arrivals of 4"):
        arrivals.times(4, random.Random(0))


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ((0.0,), "rate"),
        ((math.nan,), "rate"),
        ((math.inf,), "rate"),
        ((1.0, 0.0), "burstiness"),
        ((1.0, math.nan), "burstiness"),
        ((1.0, 1.0, -1.0), "ramp-to"),
    ],
)
def test_a_process_that_makes_no_sense_names_its_flag(arguments: tuple[float, ...], option: str) -> None:
    with pytest.raises(OptionError) as caught:
        RandomArrivals(*arguments)
    assert caught.value.option == option


def test_they_say_what_they_are() -> None:
    assert str(RandomArrivals(4)) == "4/s (Poisson)"
    assert str(RandomArrivals(4, math.inf, 8)) == "4/s rising to 8 (constant)"
    assert str(RandomArrivals(4, 0.25)) == "4/s (gamma, burstiness 0.25)"
    assert str(TraceArrivals("day", (), 2.0)) == "of day, 2 x as fast"
