"""From slices to medians and ratios: pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pageturner.loadtest.peers.cases import Case
from pageturner.loadtest.peers.turns import Slice
from pageturner.loadtest.statistics import Summary


@dataclass(frozen=True, slots=True)
class Figures:
    """An engine under a case: medians over rounds, latencies in seconds.

    throughput_ratio: output tokens/s of the first engine over this one's; ttft_ratio: this one's time to the
    first token over the first engine's. Both are medians of the ratios within each round, and above 1 where
    the first engine is the better.
    """

    engine: str
    case: Case
    rounds: int
    output_tokens_per_second: float
    ttft_p50: float
    itl_p50: float
    throughput_ratio: float
    ttft_ratio: float
    other_cores: float


def figures(slices: Sequence[Slice], engines: Sequence[str]) -> list[Figures]:
    """By case, then by engine; the first engine is the measure of the others."""
    cases = dict.fromkeys(each.case for each in slices)
    return [_figures(slices, case, engine, engines[0]) for case in cases for engine in engines]


def whole_turns(slices: Sequence[Slice], engines: Sequence[str]) -> list[Slice]:
    """Those of the turns that every engine had: what a run that ended early can compare."""
    had = Counter((each.case, each.round) for each in slices)
    return [each for each in slices if had[each.case, each.round] == len(engines)]


def _figures(slices: Sequence[Slice], case: Case, engine: str, base: str) -> Figures:
    own, measure = _rounds(slices, case, engine), _rounds(slices, case, base)
    pairs = [(own[number], measure[number]) for number in sorted(own.keys() & measure.keys())]
    latencies = [_p50(each.summary.inter_token_latency) for each in own.values()]
    return Figures(
        engine=engine,
        case=case,
        rounds=len(own),
        output_tokens_per_second=statistics.median(
            each.summary.output_tokens_per_second for each in own.values()
        ),
        ttft_p50=statistics.median(_p50(each.summary.time_to_first_token) for each in own.values()),
        itl_p50=statistics.median(latencies),
        throughput_ratio=statistics.median(
            first.summary.output_tokens_per_second / each.summary.output_tokens_per_second
            for each, first in pairs
        ),
        ttft_ratio=statistics.median(
            _p50(each.summary.time_to_first_token) / _p50(first.summary.time_to_first_token)
            for each, first in pairs
        ),
        other_cores=statistics.median(each.other_cores for each in own.values()),
    )


def _rounds(slices: Sequence[Slice], case: Case, engine: str) -> dict[int, Slice]:
    return {each.round: each for each in slices if (each.case, each.engine) == (case, engine)}


def _p50(summary: Summary | None) -> float:
    assert summary is not None, "every request of a slice brought at least two tokens"
    return summary.p50
