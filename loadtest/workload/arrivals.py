"""When conversations begin in an open loop: random processes of a rate, or the times of a trace."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pageturner.loadtest.errors import OptionError


class ArrivalProcess(Protocol):
    """str() is what a report says of it."""

    def times(self, count: int, rng: random.Random) -> Sequence[float]:
        """`count` times in order, in seconds after the start of the run."""
        ...


@dataclass(frozen=True, slots=True)
class RandomArrivals:
    """Gaps that are gamma distributed, independent, with a mean of 1 / rate.

    rate: a second. burstiness: the shape of the gamma distribution, as `vllm bench serve` means it: 1 is a
    Poisson process, below 1 they come in bursts, above 1 more evenly, infinite is a metronome; the squared
    coefficient of variation of the gaps is 1 / burstiness. end_rate: where the rate is to be at the last
    arrival; it rises (or falls) linearly from `rate` until then. Raises OptionError.
    """

    rate: float
    burstiness: float = 1.0
    end_rate: float | None = None

    def __post_init__(self) -> None:
        for option, value in (("rate", self.rate), ("ramp-to", self.end_rate)):
            if value is not None and not 0 < value < math.inf:
                raise OptionError(option, f"must be positive, not {value}")
        if not self.burstiness > 0:
            raise OptionError("burstiness", f"must be positive, not {self.burstiness}")

    def times(self, count: int, rng: random.Random) -> list[float]:
        """A process of rate 1, its time bent so that the rate is as it should be."""
        return [self._when(expected, count) for expected in self._unit_process(count, rng)]

    def _unit_process(self, count: int, rng: random.Random) -> Iterator[float]:
        at = 0.0
        for _ in range(count):
            is_even = math.isinf(self.burstiness)
            at += 1.0 if is_even else rng.gammavariate(self.burstiness, 1 / self.burstiness)
            yield at

    def _when(self, expected: float, count: int) -> float:
        """The time by which so many arrivals are expected: the inverse of the integral of the rate."""
        end_rate = self.rate if self.end_rate is None else self.end_rate
        if end_rate == self.rate:
            return expected / self.rate
        ramp_seconds = 2 * count / (self.rate + end_rate)
        if expected > count:
            return ramp_seconds + (expected - count) / end_rate
        slope = (end_rate - self.rate) / ramp_seconds
        return (math.sqrt(self.rate * self.rate + 2 * slope * expected) - self.rate) / slope

    def __str__(self) -> str:
        name = {1.0: "Poisson", math.inf: "constant"}.get(
            self.burstiness, f"gamma, burstiness {self.burstiness:g}"
        )
        ramp = "" if self.end_rate is None else f" rising to {self.end_rate:g}"
        return f"{self.rate:g}/s{ramp} ({name})"


@dataclass(frozen=True, slots=True)
class TraceArrivals:
    """The times of a trace. at_seconds: in order, from the start of the run. speed: how many times as fast.
    Raises OptionError."""

    name: str
    at_seconds: tuple[float, ...]
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.speed < math.inf:
            raise OptionError("speed", f"must be positive, not {self.speed}")

    def times(self, count: int, rng: random.Random) -> list[float]:
        """Raises OptionError where the trace has fewer."""
        if count > len(self.at_seconds):
            raise OptionError("arrivals", f"{self.name} has {len(self.at_seconds)} arrivals of {count}")
        return [at / self.speed for at in self.at_seconds[:count]]

    def __str__(self) -> str:
        return f"of {self.name}" + (f", {self.speed:g} x as fast" if self.speed != 1 else "")
