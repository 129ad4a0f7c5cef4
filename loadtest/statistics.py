"""From records to figures: pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pageturner.loadtest.client import Outcome, RequestRecord
from pageturner.loadtest.goodput import Goodput, Objectives, count_good

NO_OBJECTIVES = Objectives()


@dataclass(frozen=True, slots=True)
class Summary:
    """One quantity over all its samples, in seconds."""

    num_samples: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run in figures. Latencies and tokens are those of requests that ended well; time per output token,
    inter-token latency and end to end leave out slow readers, who make their own.

    num_planned: requests that the run was to send; more than num_requests if it was ended early, and then
    those that had not ended are counted nowhere else.
    duration_seconds: from the first request's due time to the last one's end, however it ended.
    Latencies count from the due time, all but `queue_seconds`, which is the server's own figure.
    """

    num_planned: int
    num_requests: int
    num_ok: int
    num_shed: int
    num_abandoned: int
    num_cancelled: int
    num_failed: int
    num_slow_readers: int
    duration_seconds: float
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_output_tokens: int
    num_token_messages: int
    num_swaps: int
    num_recomputes: int
    num_tail_reclaims: int
    time_to_first_token: Summary | None
    time_per_output_token: Summary | None
    inter_token_latency: Summary | None
    end_to_end: Summary | None
    queue_seconds: Summary | None
    send_lag: Summary | None
    errors: tuple[tuple[str, int], ...]
    policies: tuple[tuple[str, str], ...]
    goodput: Goodput

    @property
    def good_requests_per_second(self) -> float:
        """Those that met the objectives; where there are none, those that ended well."""
        return self._per_second(self.goodput.num_good)

    @property
    def is_complete(self) -> bool:
        """Every request that was planned has ended."""
        return self.num_requests == self.num_planned

    @property
    def requests_per_second(self) -> float:
        """Those that ended well."""
        return self._per_second(self.num_ok)

    @property
    def output_tokens_per_second(self) -> float:
        """Of requests that ended well."""
        return self._per_second(self.num_output_tokens)

    @property
    def total_tokens_per_second(self) -> float:
        """Tokens of prompts and outputs, of requests that ended well."""
        return self._per_second(self.num_prompt_tokens + self.num_output_tokens)

    @property
    def tokens_per_message(self) -> float:
        """Above 1 where the server joined tokens that waited; inter-token latency then hides some."""
        return self.num_output_tokens / self.num_token_messages if self.num_token_messages else 0.0

    def _per_second(self, count: int) -> float:
        return count / self.duration_seconds if self.duration_seconds > 0 else 0.0


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the samples lie, linear between two neighbours.

    `ordered` must be sorted and not empty.
    """
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def summarize(samples: Sequence[float]) -> Summary | None:
    """None where there is nothing to summarize."""
    if not samples:
        return None
    ordered = sorted(samples)
    return Summary(
        num_samples=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 0.50),
        p90=percentile(ordered, 0.90),
        p99=percentile(ordered, 0.99),
        max=ordered[-1],
    )


def summarize_run(
    records: Sequence[RequestRecord], num_planned: int | None = None, objectives: Objectives = NO_OBJECTIVES
) -> RunSummary:
    """The figures of a run. num_planned: requests that it was to send; None for as many as have records."""
    outcomes = Counter(record.outcome for record in records)
    ok = [record for record in records if record.outcome is Outcome.OK]
    errors = Counter(record.error for record in records if record.error)
    at_once = [record for record in ok if not record.is_slow_reader]
    first_tokens = [record.time_to_first_token for record in ok]
    per_tokens = [record.time_per_output_token for record in at_once]
    return RunSummary(
        num_planned=len(records) if num_planned is None else num_planned,
        num_requests=len(records),
        num_ok=outcomes[Outcome.OK],
        num_shed=outcomes[Outcome.SHED],
        num_abandoned=outcomes[Outcome.ABANDONED],
        num_cancelled=outcomes[Outcome.CANCELLED],
        num_failed=outcomes[Outcome.FAILED],
        num_slow_readers=sum(record.is_slow_reader for record in records),
        duration_seconds=(
            max(r.ended_at for r in records) - min(r.scheduled_at for r in records) if records else 0.0
        ),
        num_prompt_tokens=sum(record.num_prompt_tokens for record in ok),
        num_cached_prompt_tokens=sum(record.num_cached_prompt_tokens for record in ok),
        num_output_tokens=sum(record.num_output_tokens for record in ok),
        num_token_messages=sum(len(record.arrivals) for record in ok),
        num_swaps=sum(record.num_swaps for record in records),
        num_recomputes=sum(record.num_recomputes for record in records),
        num_tail_reclaims=sum(record.num_tail_reclaims for record in records),
        time_to_first_token=summarize([seconds for seconds in first_tokens if seconds is not None]),
        time_per_output_token=summarize([seconds for seconds in per_tokens if seconds is not None]),
        inter_token_latency=summarize([gap for record in at_once for gap in record.inter_token_latencies]),
        end_to_end=summarize([record.end_to_end for record in at_once]),
        queue_seconds=summarize([record.queue_seconds for record in ok]),
        send_lag=summarize([record.send_lag for record in records]),
        errors=tuple(errors.most_common()),
        policies=max(ok, key=lambda record: record.ended_at).policies if ok else (),
        goodput=count_good(records, objectives),
    )
