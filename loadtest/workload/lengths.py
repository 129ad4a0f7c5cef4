"""Distributions of whole numbers, each by its quantiles, and pairs of them that depend on each other."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from pageturner.loadtest.errors import OptionError

_NORMAL = NormalDist()
_EPSILON = 1e-12  # the normal distribution has no quantile at 0 and at 1


class Distribution(Protocol):
    """Whole numbers of at least 1. str() is what a report says of it."""

    def at(self, share: float) -> int:
        """The quantile: the number below which `share` (0 to 1) of them lie."""
        ...


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers drawn evenly from low to high, both included."""

    low: int
    high: int

    def at(self, share: float) -> int:
        """The quantile."""
        count = self.high - self.low + 1
        return self.low + min(int(share * count), count - 1)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    @staticmethod
    def parse(option: str, text: str) -> Lengths:
        """`128` or `64-256`. Raises OptionError."""
        low, _, high = text.partition("-")
        try:
            lengths = Lengths(int(low), int(high or low))
        except ValueError:
            raise OptionError(option, f"{text!r} is neither a number nor LOW-HIGH") from None
        if not 1 <= lengths.low <= lengths.high:
            raise OptionError(option, f"{text!r}: needs 1 <= LOW <= HIGH")
        return lengths


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Numbers whose logarithms are normal. sigma: their deviation."""

    median: int
    sigma: float

    def at(self, share: float) -> int:
        """The quantile."""
        normal = _NORMAL.inv_cdf(min(max(share, _EPSILON), 1 - _EPSILON))
        return max(1, round(self.median * math.exp(self.sigma * normal)))

    def __str__(self) -> str:
        return f"lognormal, median {self.median}, sigma {self.sigma:g}"


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Numbers of which some quantiles are known: between two of them, the logarithm is linear in the share.

    shares: rising, the first 0 and the last 1. values: as many, not falling, at least 1.
    """

    shares: tuple[float, ...]
    values: tuple[int, ...]

    def at(self, share: float) -> int:
        """The quantile."""
        above = min(bisect_right(self.shares, share), len(self.shares) - 1)
        low, high = self.shares[above - 1], self.shares[above]
        start, end = self.values[above - 1], self.values[above]
        return round(start * math.pow(end / start, (share - low) / (high - low)))

    def __str__(self) -> str:
        middle = self.at(0.5)
        return f"by quantiles, {self.values[0]} to {self.values[-1]}, median {middle}"


def draw_pair(
    rng: random.Random, first: Distribution, second: Distribution, correlation: float
) -> tuple[int, int]:
    """One number of each, joined by a Gaussian copula: the normal numbers behind them have this correlation
    (-1 to 1; 0 makes them independent)."""
    one, other = rng.gauss(0.0, 1.0), rng.gauss(0.0, 1.0)
    joined = correlation * one + math.sqrt(1 - correlation * correlation) * other
    return first.at(_NORMAL.cdf(one)), second.at(_NORMAL.cdf(joined))
