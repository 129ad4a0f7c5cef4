"""Slices of made-up engines, for figures."""

from __future__ import annotations

from pageturner.loadtest.client import Arrival, Outcome, RequestRecord
from pageturner.loadtest.peers.cases import Case
from pageturner.loadtest.peers.turns import Slice
from pageturner.loadtest.statistics import summarize_run

CASE = Case("one", 8, 2, concurrency=1, num_requests=1)


def slice_of(engine: str, number: int, seconds: float) -> Slice:
    """A request of two tokens: the first at half the time."""
    record = RequestRecord(
        index=0,
        outcome=Outcome.OK,
        error="",
        scheduled_at=0.0,
        sent_at=0.0,
        ended_at=seconds,
        num_prompt_tokens=8,
        arrivals=(Arrival(seconds / 2, 1), Arrival(seconds, 1)),
    )
    return Slice(engine, CASE, number, summarize_run([record]), other_cores=0.1 * number)
