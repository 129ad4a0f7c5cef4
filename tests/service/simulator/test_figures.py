"""Figures of a run worked out by hand, and intervals that a textbook gives."""

from __future__ import annotations

from array import array

import pytest

from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.errors import DeadlineExceeded
from pageturner.service.simulator.figures import METRIC, Slo, figures_of, interval
from pageturner.service.simulator.outcomes import SimulatedRequest
from pageturner.service.simulator.pool_samples import PoolSample
from pageturner.service.simulator.simulation import SimulationResult


def record(arrived_at: float, *token_times: float, num_prompt_tokens: int = 10) -> SimulatedRequest:
    times = array("d", token_times)
    return SimulatedRequest(
        arrived_at, "", num_prompt_tokens, 0, token_times[-1], times, num_output_tokens=len(token_times)
    )


def result(*requests: SimulatedRequest) -> SimulationResult:
    samples = (PoolSample(2.0, 0, 1, 0.5, 0.1, 0.0), PoolSample(10.0, 0, 1, 1.0, 0.2, 0.0))
    stats = SchedulerStats(num_swap_preemptions_total=2, num_tail_preemptions_total=1)
    return SimulationResult(requests, samples, stats, 10.0, 200, 50, 7.0)


def test_latencies_rates_and_shares() -> None:
    figures = figures_of(result(record(0, 1, 2, 3), record(1, 5, 10)), Slo(ttft_seconds=2, tpot_seconds=2))
    assert figures["throughput"] == 0.5
    assert figures["total_throughput"] == 2.5
    assert figures["goodput"] == 0.1  # the second waits 4 s for its first token
    assert figures["ttft_p50"] == 2.5
    assert figures["ttft_max"] == 4
    assert figures["tpot_mean"] == 3
    assert figures["itl_max"] == 5
    assert figures["e2e_p99"] == pytest.approx(3 + 0.99 * 6)
    assert (figures["preemptions"], figures["swap_preemptions"], figures["tail_preemptions"]) == (3, 2, 1)
    assert figures["recompute_tax"] == 0.25
    assert figures["kv_occupancy"] == pytest.approx(0.2 * 0.5 + 0.8 * 1.0)
    assert figures["fairness_gap"] == 7
    assert set(figures) <= set(METRIC)


def test_a_request_that_failed_counts_for_nothing_but_failures() -> None:
    late = record(0, 1, 9)
    late.error = DeadlineExceeded("late")
    figures = figures_of(result(late))
    assert (figures["failed"], figures["deadline_misses"], figures["throughput"]) == (1, 1, 0)
    assert "ttft_p50" not in figures


def test_the_interval_is_students() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3
    assert found.high - found.mean == pytest.approx(2.776 * (2.5 / 5) ** 0.5)
    assert found.excludes_zero
    assert not interval([-1.0, 1.0, 2.0]).excludes_zero
    assert interval([4.0]).low == interval([4.0]).high == 4.0
    assert not interval([4.0]).excludes_zero  # one seed shows nothing
