"""The knee: the highest rate of arrivals at which a server keeps its objectives.

Rates double until one fails, then the last that kept them and the first that did not are halved between
(their geometric mean) until they are close. A rate keeps them if the share of good requests is at least
`share`. Each batch of requests at a rate is one sample; batches are added until the 95 % interval of the
share (Wilson, 1927) lies on one side, or there are MAX_BATCHES of them: then the share itself decides, and
the rate is called close. Requests of one batch share a queue, so the interval is narrower than it ought to
be; it says when to stop, not how sure one may be. A batch must last, else it would be one burst that any
queue takes: `seconds` at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from pageturner.loadtest.errors import OptionError
from pageturner.loadtest.goodput import Goodput

MAX_BATCHES = 3
MAX_RATE = 1e5
_NORMAL_95 = 1.959964

Measure = Callable[[float, int], Goodput | None]
"""Send a batch at a rate; the number is of the batch, from 0, through the whole search. None: it was
ended."""


@dataclass(frozen=True, slots=True)
class KneeOptions:
    """start: the first rate. share: of the requests that must be good. precision: how far apart, as a share,
    the rate that holds and the one that does not may end. seconds: how long the arrivals of a batch take at
    least. Raises OptionError."""

    start: float = 1.0
    share: float = 0.9
    precision: float = 0.1
    seconds: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.start < MAX_RATE:
            raise OptionError("rate", f"must be positive and below {MAX_RATE:g}, not {self.start}")
        if not 0 < self.share < 1:
            raise OptionError("knee-share", f"must be between 0 and 1, not {self.share}")
        if not 0.001 <= self.precision < 1:
            raise OptionError("knee-precision", f"must be from 0.001 to 1, not {self.precision}")
        if not 0 <= self.seconds < math.inf:
            raise OptionError("knee-seconds", f"must not be negative, not {self.seconds}")

    def batch(self, rate: float, num_requests: int) -> int:
        """How many requests to send at a rate, of which at least `num_requests` were asked for."""
        return max(num_requests, math.ceil(rate * self.seconds))


@dataclass(frozen=True, slots=True)
class Probe:
    """What was found at one rate. low, high: the interval of the share. is_close: the interval holds `share`,
    so that another search may decide otherwise."""

    rate: float
    num_good: int
    num_judged: int
    low: float
    high: float
    holds: bool
    is_close: bool

    @property
    def share(self) -> float:
        """Of the requests that were good."""
        return self.num_good / self.num_judged if self.num_judged else 0.0


@dataclass(frozen=True, slots=True)
class Knee:
    """probes: in the order in which they were made. is_complete: it was not ended early."""

    options: KneeOptions
    probes: tuple[Probe, ...]
    is_complete: bool

    @property
    def rate(self) -> float | None:
        """The highest that held below all that did not; None where none did."""
        failed = min((probe.rate for probe in self.probes if not probe.holds), default=math.inf)
        return max((p.rate for p in self.probes if p.holds and p.rate < failed), default=None)

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rate": self.rate,
            "is_complete": self.is_complete,
            "options": asdict(self.options),
            "probes": [asdict(probe) | {"share": probe.share} for probe in self.probes],
        }


def find_knee(
    measure: Measure, options: KneeOptions, on_probe: Callable[[Probe], None] = lambda _: None
) -> Knee:
    """Search; on_probe hears of each rate."""
    batches = iter(range(1 << 30))
    probes: list[Probe] = []
    low, high = 0.0, math.inf
    while not _is_found(low, high, options):
        probe = _probe(measure, _next_rate(low, high, options), options, batches)
        if probe is None:
            return Knee(options, tuple(probes), is_complete=False)
        probes.append(probe)
        on_probe(probe)
        if probe.holds:
            low = probe.rate
        else:
            high = probe.rate
    return Knee(options, tuple(probes), is_complete=True)


def said_rate(rate: float) -> str:
    """In a line or a table."""
    return f"{rate:,.0f}/s" if rate >= 100 else f"{rate:.3g}/s"


def wilson(num_good: int, num_judged: int, normal: float = _NORMAL_95) -> tuple[float, float]:
    """The interval of a share of which `num_good` of `num_judged` were seen; all of it where none were."""
    if not num_judged:
        return 0.0, 1.0
    share, square = num_good / num_judged, normal * normal / num_judged
    middle = (share + square / 2) / (1 + square)
    half = normal / (1 + square) * math.sqrt(share * (1 - share) / num_judged + square / (4 * num_judged))
    return max(0.0, middle - half), min(1.0, middle + half)


def _is_found(low: float, high: float, options: KneeOptions) -> bool:
    """Also where the rates have left what can be sent, or what anyone would call a rate."""
    is_narrow = bool(low) and high <= low * (1 + options.precision)
    return is_narrow or low * 2 > MAX_RATE or high < options.start / 1024


def _next_rate(low: float, high: float, options: KneeOptions) -> float:
    if math.isinf(high):
        return low * 2 if low else options.start
    return math.sqrt(low * high) if low else high / 2


def _probe(measure: Measure, rate: float, options: KneeOptions, batches: Iterator[int]) -> Probe | None:
    num_good = num_judged = 0
    low, high = 0.0, 1.0
    for _ in range(MAX_BATCHES):
        goodput = measure(rate, next(batches))
        if goodput is None:
            return None
        num_good += goodput.num_good
        num_judged += goodput.num_judged
        low, high = wilson(num_good, num_judged)
        if not low < options.share <= high:
            break
    holds = num_judged > 0 and num_good / num_judged >= options.share
    return Probe(rate, num_good, num_judged, low, high, holds, is_close=low < options.share <= high)
