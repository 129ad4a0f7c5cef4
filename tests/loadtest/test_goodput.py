"""Goodput, and the fields of `vllm bench serve`, against their definitions written out."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageturner.loadtest.client import Arrival, Outcome, RequestRecord
from pageturner.loadtest.errors import OptionError
from pageturner.loadtest.goodput import Objectives, count_good
from pageturner.loadtest.report.bench_serve import bench_serve_fields
from pageturner.loadtest.statistics import summarize_run

LIMITS = {"ttft": 0.5, "tpot": 0.05, "itl": 0.1, "e2el": 3.0}


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    """Any end, any arrivals."""
    due = draw(st.floats(0, 10))
    at = sent = due + draw(st.floats(0, 0.1))
    arrivals = []
    for _ in range(draw(st.integers(0, 6))):
        at += draw(st.floats(0, 1))
        arrivals.append(Arrival(at, draw(st.integers(1, 3))))
    return RequestRecord(
        index=0,
        outcome=draw(st.sampled_from(Outcome)),
        error="",
        scheduled_at=due,
        sent_at=sent,
        ended_at=at + draw(st.floats(0, 1)),
        num_prompt_tokens=draw(st.integers(1, 9)),
        is_slow_reader=draw(st.booleans()),
        arrivals=tuple(arrivals),
    )


def is_good(record: RequestRecord, limits: dict[str, float]) -> bool:
    """The definition: it ended well, and each time that is the server's is within its limit."""
    times = [arrival.at for arrival in record.arrivals]
    tokens = sum(arrival.num_tokens for arrival in record.arrivals)
    found = {}
    if times:
        found["ttft"] = times[0] - record.scheduled_at
    if times and not record.is_slow_reader:
        found["e2el"] = times[-1] - record.scheduled_at
        if tokens > 1:
            found["tpot"] = (times[-1] - times[0]) / (tokens - 1)
        if len(times) > 1:
            found["itl"] = max(times[i + 1] - times[i] for i in range(len(times) - 1))
    return record.outcome is Outcome.OK and all(
        found[name] <= limit for name, limit in limits.items() if name in found
    )


@settings(deadline=None)
@given(st.lists(records(), max_size=12), st.sets(st.sampled_from(sorted(LIMITS))))
def test_goodput_is_what_the_definition_says(ran: list[RequestRecord], names: set[str]) -> None:
    limits = {name: LIMITS[name] for name in names}
    found = count_good(ran, Objectives(tuple(limits.items())))
    judged = [record for record in ran if record.outcome is not Outcome.ABANDONED]
    assert found.num_judged == len(judged)
    assert found.num_good == sum(is_good(record, limits) for record in judged)
    assert found.share == (found.num_good / len(judged) if judged else 0)
    summary = summarize_run(ran, None, Objectives(tuple(limits.items())))
    if summary.duration_seconds > 0:
        assert summary.good_requests_per_second == found.num_good / summary.duration_seconds


@settings(deadline=None)
@given(st.lists(records(), min_size=1, max_size=12))
def test_the_fields_of_bench_serve_mean_what_they_mean_there(ran: list[RequestRecord]) -> None:
    fields = bench_serve_fields(ran, summarize_run(ran))
    ok = [record for record in ran if record.outcome is Outcome.OK]
    quick = [record for record in ok if not record.is_slow_reader and record.arrivals]
    ttfts = [record.arrivals[0].at - record.scheduled_at for record in quick]
    latencies = [record.arrivals[-1].at - record.scheduled_at for record in quick]
    tokens = [sum(arrival.num_tokens for arrival in record.arrivals) for record in quick]
    itls = [
        record.arrivals[i + 1].at - record.arrivals[i].at
        for record in quick
        for i in range(len(record.arrivals) - 1)
    ]
    tpots = [
        (latency - ttft) / (count - 1)
        for latency, ttft, count in zip(latencies, ttfts, tokens, strict=True)
        if count > 1
    ]
    for name, samples in (("ttft", ttfts), ("tpot", tpots), ("itl", itls), ("e2el", latencies)):
        if not samples:
            assert f"mean_{name}_ms" not in fields
            continue
        assert fields[f"mean_{name}_ms"] == pytest.approx(1e3 * statistics.fmean(samples), abs=1e-6)
        assert fields[f"median_{name}_ms"] == pytest.approx(1e3 * statistics.median(samples), abs=1e-6)
        assert fields[f"std_{name}_ms"] == pytest.approx(1e3 * statistics.pstdev(samples), abs=1e-6)
        assert fields[f"p99_{name}_ms"] <= 1e3 * max(samples) + 1e-6
    assert fields["completed"] == len(ok)
    assert fields["failed"] == len(ran) - len(ok)
    assert fields["total_output_tokens"] == sum(record.num_output_tokens for record in ok)
    duration = fields["duration"]
    if duration > 0:
        assert fields["output_throughput"] == fields["total_output_tokens"] / duration
        assert fields["request_throughput"] == len(ok) / duration
    assert fields["request_goodput"] is None, "no objectives were given"


def test_requests_at_once_are_those_of_one_second() -> None:
    """The first is under way in seconds 0 to 2, the others in 1 to 3 and in 3."""
    spans = ((10.0, 12.5), (11.2, 13.0), (13.4, 13.9))
    ran = [
        RequestRecord(0, Outcome.OK, "", due, due, last, 1, arrivals=(Arrival(last, 1),))
        for due, last in spans
    ]
    assert bench_serve_fields(ran, summarize_run(ran))["max_concurrent_requests"] == 2
    assert bench_serve_fields([], summarize_run([]))["max_concurrent_requests"] == 0


def test_objectives_are_read_in_milliseconds() -> None:
    objectives = Objectives.parse(["ttft:500", "itl:50.5"])
    assert objectives.limits == (("ttft", 0.5), ("itl", 0.0505))
    assert str(objectives) == "ttft:500 itl:50.5"


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("ttft", "not NAME:MILLISECONDS"),
        ("ttft:x", "not NAME:MILLISECONDS"),
        ("speed:1", "none of ttft, tpot, itl, e2el"),
        ("ttft:0", "must be above 0"),
        ("ttft:nan", "must be above 0"),
        ("ttft:inf", "must be above 0"),
    ],
)
def test_bad_objectives_are_refused(word: str, reason: str) -> None:
    with pytest.raises(OptionError, match=f"--goodput: .*{reason}"):
        Objectives.parse([word])
