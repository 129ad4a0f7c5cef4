"""The bound of a search: a round at least, no more than were asked for, each under a seed of its own."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from support.at_length import ROUND, AtLength

COMMON = settings(deadline=None, database=None)


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, ROUND), (2.5, 3 * ROUND), (99.0, 100)])
def test_rounds_begin_until_the_time_is_over(seconds: float, expected: int) -> None:
    """By a clock that goes on by a second a look."""
    drawn: list[int] = []
    told: list[str] = []

    class Machine(RuleBasedStateMachine):
        @rule(number=st.integers(0, 1 << 60))
        def draw(self, number: int) -> None:
            drawn.append(number)

    ticks = count()
    at_length = AtLength(seconds, 7, told.append, lambda: float(next(ticks)))
    assert at_length.run(Machine, COMMON, examples=100, steps=2) == expected
    assert told == [f"{expected} of 100 examples from seed 7 on"]
    first, drawn[:] = list(drawn), []
    again = AtLength(seconds, 7, told.append, lambda: 0.0)
    again.run(Machine, COMMON, examples=expected, steps=2)
    assert drawn == first, "the same seeds draw the same"
    assert len(set(drawn)) > expected // 2, "rounds do not repeat one another"


def test_what_a_machine_finds_is_raised() -> None:
    class Machine(RuleBasedStateMachine):
        @rule(number=st.integers())
        def fail(self, number: int) -> None:
            assert number < 1000

    with pytest.raises(AssertionError):
        AtLength(99.0, 0, print).run(Machine, COMMON, examples=50, steps=5)


def test_a_check_is_held_by_the_same_rounds() -> None:
    drawn: list[int] = []
    at_length = AtLength(99.0, 3, print, lambda: 0.0)
    assert at_length.hold(drawn.append, (st.integers(0, 1 << 60),), COMMON, 2 * ROUND) == 2 * ROUND
    assert len(drawn) == 2 * ROUND
    assert len(set(drawn)) > ROUND


def test_what_a_check_finds_is_raised() -> None:
    def check(first: int, second: int) -> None:
        assert first <= second

    with pytest.raises(AssertionError):
        AtLength(99.0, 0, print).hold(check, (st.integers(), st.integers()), COMMON, 50)
