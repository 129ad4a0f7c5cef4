"""Figures worked out by hand."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageturner.loadtest.client import Arrival, Outcome, RequestRecord
from pageturner.loadtest.statistics import Summary, percentile, summarize, summarize_run

OK = RequestRecord(
    index=0,
    outcome=Outcome.OK,
    error="",
    scheduled_at=10.0,
    sent_at=10.5,
    ended_at=16.0,
    num_prompt_tokens=100,
    arrivals=(Arrival(12.0, 1), Arrival(13.0, 2), Arrival(15.0, 1)),
    num_cached_prompt_tokens=32,
    queue_seconds=0.25,
    num_swaps=1,
    num_recomputes=2,
    num_tail_reclaims=3,
    policies=(("queue", "fcfs"),),
)


def test_percentiles_lie_between_neighbours() -> None:
    ordered = [10.0, 20.0, 30.0, 40.0]
    assert percentile(ordered, 0.0) == 10.0
    assert percentile(ordered, 0.5) == 25.0
    assert percentile(ordered, 0.9) == pytest.approx(37.0)
    assert percentile(ordered, 1.0) == 40.0
    assert percentile([7.0], 0.99) == 7.0


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50))
def test_percentiles_agree_with_the_standard_library(samples: list[float]) -> None:
    ordered = sorted(samples)
    cuts = statistics.quantiles(ordered, n=100, method="inclusive")
    for share in (50, 90, 99):
        assert percentile(ordered, share / 100) == pytest.approx(cuts[share - 1])


def test_a_summary_of_any_order_of_samples() -> None:
    assert summarize([5.0, 1.0, 3.0, 2.0, 4.0, 6.0, 11.0, 8.0, 9.0, 10.0, 7.0]) == Summary(
        11, 6, 6, 10, 10.9, 11
    )
    assert summarize([]) is None


def test_latencies_of_a_request_count_from_when_it_was_due() -> None:
    assert OK.send_lag == 0.5
    assert OK.time_to_first_token == 2.0  # not 1.5, as it would be from the sending
    assert OK.end_to_end == 6.0
    assert OK.num_output_tokens == 4
    assert OK.time_per_output_token == 1.0  # 3 s for the 3 tokens after the first
    assert OK.inter_token_latencies == [1.0, 2.0]


def test_a_request_of_one_token_has_no_time_per_token() -> None:
    record = replace(OK, arrivals=(Arrival(12.0, 1),))
    assert record.time_per_output_token is None
    assert record.inter_token_latencies == []
    assert replace(OK, arrivals=()).time_to_first_token is None


def test_a_run_counts_what_ended_well_and_tells_the_rest_apart() -> None:
    late = replace(
        OK, index=1, scheduled_at=12.0, sent_at=12.0, ended_at=20.0, policies=(("queue", "priority"),)
    )
    shed = replace(OK, index=2, outcome=Outcome.SHED, error="full", arrivals=(), num_swaps=0, sent_at=10.0)
    cut = replace(OK, index=3, outcome=Outcome.CANCELLED, error="late", ended_at=30.0)
    broken = replace(OK, index=4, outcome=Outcome.FAILED, error="full")
    run = summarize_run([OK, late, shed, cut, broken])

    assert (run.num_requests, run.num_ok, run.num_shed, run.num_cancelled, run.num_failed) == (5, 2, 1, 1, 1)
    assert run.duration_seconds == 20.0  # the cancelled one ended last, and the clock ran until then
    assert run.requests_per_second == 0.1
    assert run.num_output_tokens == 8
    assert run.output_tokens_per_second == 0.4
    assert run.total_tokens_per_second == (200 + 8) / 20
    assert run.tokens_per_message == 8 / 6
    assert run.num_cached_prompt_tokens == 64
    assert (run.num_swaps, run.num_recomputes, run.num_tail_reclaims) == (4, 10, 15)
    assert run.errors == (("full", 2), ("late", 1))
    assert run.policies == (("queue", "priority"),)
    assert run.time_to_first_token is not None
    assert run.time_to_first_token.num_samples == 2
    assert run.time_to_first_token.mean == 1.0  # 2 s, and 0 s for the one due at 12
    assert run.inter_token_latency is not None
    assert run.inter_token_latency.num_samples == 4
    assert run.send_lag is not None
    assert run.send_lag.num_samples == 5


def test_a_run_in_which_nothing_ended_well_has_no_latencies() -> None:
    run = summarize_run([replace(OK, outcome=Outcome.SHED, error="full", arrivals=())])
    assert run.end_to_end is None
    assert run.output_tokens_per_second == 0.0
    assert run.tokens_per_message == 0.0
    assert run.policies == ()
