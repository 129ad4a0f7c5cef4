"""Service-level objectives, and which requests met them, as `vllm bench serve --goodput` counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pageturner.loadtest.client import Outcome, RequestRecord
from pageturner.loadtest.errors import OptionError

Measure = Callable[[RequestRecord], float | None]


def _longest_pause(record: RequestRecord) -> float | None:
    return max(record.inter_token_latencies, default=None)


MEASURES: dict[str, Measure] = {
    "ttft": lambda record: record.time_to_first_token,
    "tpot": lambda record: record.time_per_output_token,
    "itl": _longest_pause,
    "e2el": lambda record: record.last_token,
}
"""Seconds of one request, by the name of an objective; None where it has none."""

_OF_THE_READER = ("tpot", "itl", "e2el")
"""What a slow reader makes itself, so that no server can answer for it."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """limits: names of MEASURES, each with the seconds that it may take. Raises OptionError."""

    limits: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for name, seconds in self.limits:
            if name not in MEASURES:
                raise OptionError("goodput", f"{name!r} is none of {', '.join(MEASURES)}")
            if not 0 < seconds < math.inf:
                raise OptionError("goodput", f"{name}: must be above 0 milliseconds, not {1e3 * seconds:g}")

    def is_met(self, record: RequestRecord) -> bool:
        """It ended well, and nothing took longer than its limit."""
        if record.outcome is not Outcome.OK:
            return False
        for name, limit in self.limits:
            seconds = MEASURES[name](record)
            is_judged = not (record.is_slow_reader and name in _OF_THE_READER)
            if is_judged and seconds is not None and seconds > limit:
                return False
        return True

    def __str__(self) -> str:
        return " ".join(f"{name}:{1e3 * seconds:g}" for name, seconds in self.limits)

    @staticmethod
    def parse(words: Sequence[str]) -> Objectives:
        """`ttft:500 itl:50`, in milliseconds. Raises OptionError."""
        limits = []
        for word in words:
            name, _, value = word.partition(":")
            try:
                limits.append((name, float(value) / 1e3))
            except ValueError:
                raise OptionError("goodput", f"{word!r} is not NAME:MILLISECONDS") from None
        return Objectives(tuple(limits))


@dataclass(frozen=True, slots=True)
class Goodput:
    """How many requests met the objectives. num_judged: all but those that the client abandoned."""

    objectives: Objectives
    num_good: int
    num_judged: int

    @property
    def share(self) -> float:
        """Of the requests that are judged: those shed or failed were not good."""
        return self.num_good / self.num_judged if self.num_judged else 0.0


def count_good(records: Sequence[RequestRecord], objectives: Objectives) -> Goodput:
    """Of a whole run."""
    judged = [record for record in records if record.outcome is not Outcome.ABANDONED]
    return Goodput(objectives, sum(map(objectives.is_met, judged)), len(judged))
