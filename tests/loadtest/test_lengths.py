"""Lengths have the quantiles and the correlation that their workload states."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageturner.loadtest.workload import Lengths, Lognormal, Quantiles
from pageturner.loadtest.workload.lengths import Distribution, draw_pair
from pageturner.loadtest.workload.named import NAMED

SHARES = (0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99)
SHAREGPT_PROMPTS = (5, 8, 10, 20, 106, 388, 657, 809, 958)
SHAREGPT_ANSWERS = (4, 8, 11, 27, 138, 339, 531, 697, 931)
SHAREGPT_MESSAGES = (2, 2, 2, 3, 6, 10, 14, 17, 26)


@settings(deadline=None)
@given(low=st.integers(1, 50), width=st.integers(0, 20))
def test_even_lengths_are_each_as_likely(low: int, width: int) -> None:
    lengths = Lengths(low, low + width)
    count = 100 * (width + 1)
    drawn = [lengths.at((index + 0.5) / count) for index in range(count)]
    assert {length: drawn.count(length) for length in drawn} == dict.fromkeys(
        range(low, low + width + 1), 100
    )
    assert lengths.at(1.0) == low + width


def test_lognormal_lengths_have_their_median_and_deviation() -> None:
    lengths = Lognormal(1000, 0.5)
    assert lengths.at(0.5) == 1000
    assert lengths.at(0.8413447) == pytest.approx(1000 * math.exp(0.5), rel=1e-3)
    assert 1 <= lengths.at(0.0) < lengths.at(1.0)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 5000), min_size=2, max_size=8),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_quantiles_are_met_and_do_not_fall_between(values: list[int], one: float, other: float) -> None:
    values.sort()
    shares = tuple(index / (len(values) - 1) for index in range(len(values)))
    lengths = Quantiles(shares, tuple(values))
    assert [lengths.at(share) for share in shares] == values
    assert lengths.at(min(one, other)) <= lengths.at(max(one, other))


def test_chat_has_the_quantiles_of_sharegpt() -> None:
    chat = NAMED["chat"]
    assert tuple(map(chat.prompt_lengths.at, SHARES)) == SHAREGPT_PROMPTS
    assert tuple(map(chat.output_lengths.at, SHARES)) == SHAREGPT_ANSWERS
    assert tuple(map(chat.turns.at, SHARES)) == tuple(math.ceil(count / 2) for count in SHAREGPT_MESSAGES)


def test_chat_is_drawn_with_the_quantiles_means_and_correlation_of_sharegpt() -> None:
    chat, rng = NAMED["chat"], random.Random(5)
    pairs = [
        draw_pair(rng, chat.prompt_lengths, chat.output_lengths, chat.correlation) for _ in range(20_000)
    ]
    prompts, answers = zip(*pairs, strict=True)
    for drawn, told in ((prompts, SHAREGPT_PROMPTS), (answers, SHAREGPT_ANSWERS)):
        ordered = sorted(drawn)
        for share, length in zip(SHARES, told, strict=True):
            # By shares: how many lie below is off by no more than chance and the rounding of short lengths.
            below = sum(each < length for each in ordered) / len(ordered)
            up_to = sum(each <= length for each in ordered) / len(ordered)
            assert below - 0.015 <= share <= up_to + 0.015
    assert statistics.fmean(prompts) == pytest.approx(235, rel=0.05)
    assert statistics.fmean(answers) == pytest.approx(215, rel=0.05)
    logs = [[math.log(each) for each in drawn] for drawn in (prompts, answers)]
    assert statistics.correlation(*logs) == pytest.approx(-0.46, abs=0.03)


@pytest.mark.parametrize("correlation", [-0.9, 0.0, 0.6])
def test_the_copula_correlates_and_leaves_each_distribution_as_it_is(correlation: float) -> None:
    normal: Distribution = Lognormal(10_000, 0.7)
    rng = random.Random(2)
    pairs = [draw_pair(rng, normal, normal, correlation) for _ in range(8000)]
    first, second = ([math.log(each) for each in drawn] for drawn in zip(*pairs, strict=True))
    # The logarithms are the normal numbers themselves, so their correlation is the copula's.
    assert statistics.correlation(first, second) == pytest.approx(correlation, abs=0.04)
    for drawn in (first, second):
        assert statistics.fmean(drawn) == pytest.approx(math.log(10_000), abs=0.04)
        assert statistics.stdev(drawn) == pytest.approx(0.7, rel=0.05)
