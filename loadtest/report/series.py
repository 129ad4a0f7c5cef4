"""What changes over a run, and how latencies are distributed: plain lists, for a page to draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

from pageturner.loadtest.client import Outcome, RequestRecord
from pageturner.loadtest.monitor import LoadSample
from pageturner.loadtest.statistics import percentile

MAX_POINTS = 500
"""Of a line; samples in between are left out."""

_SHARES = (*(index / 100 for index in range(100)), 0.995, 0.999, 1.0)
_MIN_BIN_SECONDS = 0.25
_MAX_BINS = 120


def load_over_time(samples: Sequence[LoadSample], start: float) -> Mapping[str, list[float]]:
    """Every field of LoadSample as a column; `seconds` after the start in place of `at`."""
    kept = _thinned(samples)
    columns: dict[str, list[float]] = {"seconds": [sample.at - start for sample in kept]}
    for field in fields(LoadSample):
        if field.name != "at":
            columns[field.name] = [getattr(sample, field.name) for sample in kept]
    return columns


def tokens_over_time(records: Sequence[RequestRecord], start: float) -> Mapping[str, list[float]]:
    """Output tokens a second as they came, of all requests, in even steps; `seconds` is the middle of a
    step."""
    arrivals = [(arrival.at - start, arrival.num_tokens) for r in records for arrival in r.arrivals]
    if not arrivals:
        return {"seconds": [], "output_tokens_per_second": []}
    end = max(at for at, _ in arrivals)
    width = max(_MIN_BIN_SECONDS, end / _MAX_BINS)
    counts = [0] * (math.floor(end / width) + 1)
    for at, num_tokens in arrivals:
        counts[max(0, math.floor(at / width))] += num_tokens
    return {
        "seconds": [(index + 0.5) * width for index in range(len(counts))],
        "output_tokens_per_second": [count / width for count in counts],
    }


def distributions(records: Sequence[RequestRecord]) -> Mapping[str, list[float]]:
    """Quantiles in seconds at `shares`, by the names of objectives; those without samples are left out."""
    ok = [record for record in records if record.outcome is Outcome.OK and not record.is_slow_reader]
    samples: dict[str, Iterable[float | None]] = {
        "ttft": (record.time_to_first_token for record in ok),
        "tpot": (record.time_per_output_token for record in ok),
        "itl": (gap for record in ok for gap in record.inter_token_latencies),
        "e2el": (record.last_token for record in ok),
    }
    found: dict[str, list[float]] = {"shares": list(_SHARES)}
    for name, seconds in samples.items():
        ordered = sorted(each for each in seconds if each is not None)
        if ordered:
            found[name] = [percentile(ordered, share) for share in _SHARES]
    return found


def _thinned(samples: Sequence[LoadSample]) -> list[LoadSample]:
    """At most MAX_POINTS, evenly, the last one among them."""
    stride = math.ceil(len(samples) / MAX_POINTS) if samples else 1
    return list(reversed(samples[::-stride])) if samples else []
