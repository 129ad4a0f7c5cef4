"""What metrics are counted with."""

from __future__ import annotations

import pytest

from pageturner.service.engine.instruments import OTHER, BoundedLabel, Histogram, RecentRate


def test_a_histogram_is_cumulative_and_an_observation_at_a_bound_is_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value, count in ((0.5, 1), (1.0, 2), (1.5, 3), (9.0, 4)):
        histogram.observe(value, count)
    snapshot = histogram.snapshot()
    assert snapshot.cumulative == (3, 6, 10)
    assert snapshot.count == 10
    assert snapshot.sum == 0.5 + 2.0 + 4.5 + 36.0


def test_a_snapshot_does_not_change() -> None:
    histogram = Histogram((1.0,))
    before = histogram.snapshot()
    histogram.observe(0.5)
    assert before.count == 0


def test_a_rate_is_that_of_the_last_ten_whole_seconds() -> None:
    rate = RecentRate()
    for second in range(100, 120):
        rate.add(5, second + 0.1)
        rate.add(5, second + 0.9)
    assert rate.per_second(120.0) == 10.0
    assert rate.per_second(119.5) == 10.0, "the second under way is not whole"
    assert rate.per_second(125.0) == 5.0
    assert rate.per_second(130.0) == 0.0


def test_a_rate_forgets_what_lies_rounds_back() -> None:
    rate = RecentRate()
    rate.add(7, 1.0)
    rate.add(1, 1.0 + 12 * 50)
    assert rate.per_second(602.0) == pytest.approx(0.1)


def test_a_label_keeps_its_first_values_and_joins_the_rest() -> None:
    label = BoundedLabel(2)
    assert [label.of(value) for value in "abcab"] == ["a", "b", OTHER, "a", "b"]
    assert BoundedLabel(0).of("a") == OTHER
