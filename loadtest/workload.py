"""What is sent, and when: pure, and the same for the same seed, however many processes send it.

Each request draws from a generator of its own, seeded by (seed, index), so that a process can make its
share of the requests without making the others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from pageturner.loadtest.errors import OptionError

Value = TypeVar("Value", int, str)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers drawn evenly from low to high, both included."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return rng.randint(self.low, self.high)

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


@dataclass(frozen=True, slots=True)
class LoadtestWorkload:
    """All requests of a run.

    token_ids: the ids that prompts are made of; those of a model's text, once it is known.
    shared_prefix_tokens: how many tokens at the head of each prompt are the same in all of them; they count
    towards its length. rate: arrivals a second on average, of a Poisson process; None is a closed loop, where
    a request is sent when another ended.
    Raises OptionError.
    """

    num_requests: int
    prompt_lengths: Lengths
    output_lengths: Lengths
    token_ids: tuple[int, ...] = (0,)
    seed: int = 0
    shared_prefix_tokens: int = 0
    rate: float | None = None
    priorities: Mix[int] = Mix((0,), (1.0,))
    tenants: Mix[str] = Mix(("",), (1.0,))

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise OptionError("requests", f"must be at least 1, not {self.num_requests}")
        if not 0 <= self.shared_prefix_tokens <= self.prompt_lengths.low:
            raise OptionError(
                "shared-prefix-tokens",
                f"{self.shared_prefix_tokens} is not within the shortest prompt ({self.prompt_lengths.low})",
            )
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise OptionError("rate", f"must be positive, not {self.rate}")
        assert self.token_ids, "a workload needs token ids to make prompts of"


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to be sent. at_seconds: after the start of the run; 0 for all in a closed loop."""

    index: int
    at_seconds: float
    prompt_token_ids: tuple[int, ...]
    output_tokens: int
    priority: int
    tenant: str


def plan_requests(workload: LoadtestWorkload, part: int = 0, num_parts: int = 1) -> Iterator[PlannedRequest]:
    """Every request of the workload whose index is `part` modulo `num_parts`, in order of time."""
    prefix_rng = random.Random(f"{workload.seed}/prefix")
    prefix = tuple(prefix_rng.choices(workload.token_ids, k=workload.shared_prefix_tokens))
    for index, at_seconds in enumerate(arrivals(workload)):
        if index % num_parts != part:
            continue
        rng = random.Random(f"{workload.seed}/request/{index}")
        prompt_length = workload.prompt_lengths.draw(rng)
        yield PlannedRequest(
            index=index,
            at_seconds=at_seconds,
            prompt_token_ids=(*prefix, *rng.choices(workload.token_ids, k=prompt_length - len(prefix))),
            output_tokens=workload.output_lengths.draw(rng),
            priority=workload.priorities.draw(rng),
            tenant=workload.tenants.draw(rng),
        )


def arrivals(workload: LoadtestWorkload) -> Iterator[float]:
    """Seconds after the start at which each request is due; gaps are exponential for an open loop."""
    rng = random.Random(f"{workload.seed}/arrivals")
    at_seconds = 0.0
    for _ in range(workload.num_requests):
        if workload.rate is not None:
            at_seconds += rng.expovariate(workload.rate)
        yield at_seconds
