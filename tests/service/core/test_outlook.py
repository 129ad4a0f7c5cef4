"""The forecast at the door: never negative, monotone in the queue ahead, nothing where nothing waits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.outlook import Concurrency, Outlook, Work
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.scheduling.intake import asked_work, check_deadline, check_queue
from pageturner.service.errors import DeadlineTooClose, QueueFull

COMMON = settings(deadline=None, max_examples=100)
OPTIONS = SchedulerOptions(max_waiting=4, max_queued_tokens=1000, max_model_len=256)

works = st.builds(Work, st.integers(0, 10**6), st.integers(0, 1000), st.integers(0, 10**6))
concurrencies = st.builds(
    Concurrency,
    st.floats(0.0, 1.0),
    st.floats(0.0, 1e-2),
    st.floats(0.0, 1e-2),
    st.integers(0, 300),
    st.floats(0.0, 100.0),
)
outlooks = st.builds(
    Outlook,
    num_queued=st.integers(0, 4),
    num_queued_prompt_tokens=st.integers(0, 1000),
    queue=works,
    drain_rate=st.floats(1e-3, 1e9),
    is_full=st.booleans(),
    is_in_order=st.booleans(),
    concurrency=concurrencies,
    next_end=st.floats(0.0, 1e3),
    short_answer=st.floats(1.0, 1e12),
    typical_answer=st.floats(1.0, 1e12),
)


def refusal(outlook: Outlook, work: Work, seconds: float | None = None) -> QueueFull | None:
    try:
        check_queue(OPTIONS, outlook, work)
        if seconds is not None:
            check_deadline(OPTIONS, outlook, work, seconds)
    except QueueFull as error:
        return error
    return None


@COMMON
@given(outlooks, works)
def test_the_queue_takes_no_less_time_with_more_in_it(outlook: Outlook, more: Work) -> None:
    longer = replace(outlook, queue=outlook.queue + more)
    assert 0.0 <= outlook.queue_seconds <= longer.queue_seconds
    assert longer.queue - more == outlook.queue


def test_nothing_starts_before_the_first_that_runs_has_ended() -> None:
    assert replace(BUSY, next_end=9.0).queue_seconds == 9.0
    assert replace(BUSY, next_end=9.0, is_full=False).queue_seconds == BUSY.queue_seconds == 4.0
    assert replace(BUSY, next_end=9.0, queue=Work()).queue_seconds == 0.0


def test_an_idle_server_lets_nothing_wait_and_refuses_nothing() -> None:
    outlook = Outlook(drain_rate=0.001, concurrency=Concurrency(step=10.0, output_token=1.0))
    assert outlook.queue_seconds == 0.0
    assert refusal(outlook, Work(250, 1, 6), seconds=0.1) is None


@COMMON
@given(outlooks, st.integers(1, 200), st.integers(1, 50), st.integers(1, 4), st.floats(0.01, 1e4), works)
def test_who_is_refused_is_refused_behind_more_and_told_a_time(
    outlook: Outlook, num_prompt: int, max_tokens: int, n: int, seconds: float, more: Work
) -> None:
    work = asked_work(num_prompt, SamplingParams(max_tokens=max_tokens, n=n), OPTIONS)
    found = refusal(outlook, work, seconds)
    if found is None:
        return
    assert found.retry_after_seconds >= 0
    behind = refusal(replace(outlook, queue=outlook.queue + more), work, seconds)
    assert behind is not None
    assert behind.retry_after_seconds >= found.retry_after_seconds - 1e-6


@COMMON
@given(outlooks, st.integers(1, 200), st.floats(0.01, 1e4), st.floats(0.0, 1e4))
def test_more_time_never_turns_an_admission_into_a_refusal(
    outlook: Outlook, num_prompt: int, seconds: float, more: float
) -> None:
    work = asked_work(num_prompt, SamplingParams(max_tokens=8), OPTIONS)
    if refusal(outlook, work, seconds) is None:
        assert refusal(outlook, work, seconds + more) is None


BUSY = Outlook(
    num_queued=2,
    num_queued_prompt_tokens=200,
    queue=Work(200, 2, 200),
    drain_rate=100.0,
    is_full=True,
    concurrency=Concurrency(0.01, 0.001, 0.001, num_rows=10),
    short_answer=50.0,
    typical_answer=100.0,
)


def test_a_deadline_counts_the_queue_ahead_and_the_answer() -> None:
    """200 tokens of prompts and 200 of answers are ahead, at 100 a second; the answer takes one itself."""
    work = asked_work(100, SamplingParams(max_tokens=100), OPTIONS)
    assert BUSY.queue_seconds == 4.0
    assert refusal(BUSY, work, 6.5) is None
    found = refusal(BUSY, work, 3.0)
    assert isinstance(found, DeadlineTooClose)
    assert 0 < found.retry_after_seconds <= 4.0
    assert refusal(replace(BUSY, is_full=False), work, 3.0) is None
    assert refusal(replace(BUSY, is_in_order=False), work, 3.0) is None, "it may go before those that wait"


@pytest.mark.parametrize(
    ("outlook", "work", "counted_as", "seconds"),
    [
        (replace(BUSY, num_queued=4), Work(1, 1, 1), "queue_full", 1.0),  # one of four has to start
        (replace(BUSY, num_queued=5), Work(1, 1, 1), "queue_full", 1.6),
        (replace(BUSY, num_queued_prompt_tokens=900), Work(325, 1, 1), "queued_tokens", 1.0),  # 225 of 900
    ],
)
def test_a_full_queue_is_told_by_its_bound_and_by_when_it_has_room(
    outlook: Outlook, work: Work, counted_as: str, seconds: float
) -> None:
    found = refusal(outlook, work)
    assert found is not None
    assert found.counted_as == counted_as
    assert found.retry_after_seconds == pytest.approx(seconds)
