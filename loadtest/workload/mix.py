"""Labels that are mixed by weight."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Generic, TypeVar

from pageturner.loadtest.errors import OptionError

Value = TypeVar("Value", int, str)


@dataclass(frozen=True, slots=True)
class Mix(Generic[Value]):
    """Values, each drawn as often as its weight says."""

    values: tuple[Value, ...]
    weights: tuple[float, ...]

    def draw(self, rng: random.Random) -> Value:
        """One value."""
        return rng.choices(self.values, self.weights)[0]

    def __str__(self) -> str:
        return ",".join(
            f"{value}:{weight:g}" for value, weight in zip(self.values, self.weights, strict=True)
        )

    @staticmethod
    def parse_integers(option: str, text: str) -> Mix[int]:
        """`0:9,5:1`: nine of ten are 0, one is 5. Raises OptionError."""
        named = Mix.parse(option, text)
        try:
            values = tuple(int(value) for value in named.values)
        except ValueError:
            raise OptionError(option, f"{text!r}: each value must be a whole number") from None
        if not all(-(1 << 31) <= value < 1 << 31 for value in values):
            raise OptionError(option, f"{text!r}: each value must fit 32 bits")
        return Mix(values, named.weights)

    @staticmethod
    def parse(option: str, text: str) -> Mix[str]:
        """`alice:3,bob`: a weight left out is 1. Raises OptionError."""
        values, weights = [], []
        for part in text.split(","):
            value, _, weight = part.partition(":")
            try:
                values.append(value)
                weights.append(float(weight or 1))
            except ValueError:
                raise OptionError(option, f"{part!r}: the weight is not a number") from None
        if not all(0 < weight < float("inf") for weight in weights):
            raise OptionError(option, f"{text!r}: weights must be positive")
        if len(values) > 1 and not all(values):
            raise OptionError(option, f"{text!r}: a value is empty")
        return Mix(tuple(values), tuple(weights))
