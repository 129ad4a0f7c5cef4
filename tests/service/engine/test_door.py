"""The door: what it admits the scheduler never refuses; who is refused is told when to return."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.core_harness import CoreHarness

from pageturner.policies import registry
from pageturner.service.core.clock import ManualClock
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.outlook import Concurrency, Outlook, Work
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.engine.api import GenerationRequest
from pageturner.service.engine.door import Door
from pageturner.service.engine.retry_times import LEAST_SECONDS, MOST_SECONDS, RetryTimes
from pageturner.service.errors import DeadlineTooClose, QueueFull

OPTIONS = SchedulerOptions(
    max_model_len=64, max_num_seqs=2, max_num_batched_tokens=8, max_waiting=3, max_queued_tokens=24
)
PARAMS = SamplingParams(max_tokens=4)


def new_request(name: str, num_tokens: int) -> NewRequest:
    return NewRequest(name, (1,) * num_tokens, PARAMS, seed=0, arrival_time=0.0)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["ask", "ask", "send", "step"]), st.integers(1, 12)), max_size=60))
def test_the_scheduler_refuses_nothing_that_the_door_admitted(moves: list[tuple[str, int]]) -> None:
    """Whatever is under way, and however old the figures: pools this small preempt, and what is preempted
    waits again, but takes no place in the queue."""
    check_agreement(moves, Door)


def check_agreement(moves: list[tuple[str, int]], kind: type[Door]) -> None:
    harness = CoreHarness(registry.default_policies(), num_blocks=6, block_size=4, options=OPTIONS)
    stats = harness.scheduler.stats()
    door = kind(OPTIONS, ManualClock(), Random(0), lambda: stats)
    sent: list[tuple[NewRequest, Work]] = []
    for number, (move, size) in enumerate(moves):
        if move == "ask":
            request = GenerationRequest((1,) * size, PARAMS)
            try:
                door.check(request, 0.0, size)
            except QueueFull:
                continue
            new = new_request(f"door-{number}", size)
            sent.append((new, door.admit(new)))
        elif move == "send" and sent:
            new, work = sent.pop(0)
            harness.submit(new.prompt_token_ids, max_tokens=4)  # raises QueueFull if it finds no room
            door.answered(work)
            stats = harness.scheduler.stats()
        elif move == "step" and harness.scheduler.has_work():
            harness.step()  # the door hears of it when the next answer comes


class CountsNothingUnderWay(Door):
    """Planted: it asks the scheduler's figures alone."""

    def admit(self, new: NewRequest) -> Work:
        return Work()

    def answered(self, work: Work) -> None:
        pass


def test_a_door_that_forgets_what_is_under_way_is_caught() -> None:
    moves = [("ask", 1)] * 8 + [("send", 1)] * 8
    check_agreement(moves, Door)
    with pytest.raises(QueueFull):
        check_agreement(moves, CountsNothingUnderWay)


BUSY = SchedulerStats(
    outlook=Outlook(
        num_queued=3,
        num_queued_prompt_tokens=12,
        queue=Work(12, 3, 12),
        drain_rate=2.0,
        is_full=True,
        concurrency=Concurrency(0.1, 0.01, 0.01, num_rows=2),
        short_answer=4.0,
        typical_answer=4.0,
    )
)


def test_refused_clients_are_told_to_return_one_after_the_other() -> None:
    """24 tokens wait at 2 a second: a place in three is free after 4 seconds, and 8 tokens take 4 more."""
    clock = ManualClock()
    door = Door(OPTIONS, clock, Random(1), lambda: BUSY)
    waits = []
    for _ in range(4):
        with pytest.raises(QueueFull) as caught:
            door.check(GenerationRequest((1,) * 4, PARAMS), clock.now(), 4)
        waits.append(caught.value.retry_after_seconds)
    for wait, least in zip(waits, (4.0, 8.0, 12.0, 16.0), strict=True):
        assert least <= wait <= 1.2 * least
    clock.advance(60.0)
    with pytest.raises(QueueFull) as caught:
        door.check(GenerationRequest((1,) * 4, PARAMS), clock.now(), 4)
    assert caught.value.retry_after_seconds <= 4.8, "those that were due have come, or never will"


def test_a_deadline_is_refused_at_the_door_by_the_time_that_is_left_of_it() -> None:
    clock = ManualClock()
    stats = SchedulerStats(outlook=Outlook(queue=BUSY.outlook.queue, drain_rate=12.0, is_full=True))
    door = Door(OPTIONS, clock, Random(1), lambda: stats)
    request = GenerationRequest((1,) * 4, PARAMS, deadline_seconds=5.0)
    door.check(request, 0.0, 4)
    clock.advance(4.5)
    with pytest.raises(DeadlineTooClose):
        door.check(request, 0.0, 4)
    door.check(GenerationRequest((1,) * 4, PARAMS), 0.0, 4)


def test_what_is_under_way_counts_for_the_forecast_until_it_is_answered() -> None:
    stats = SchedulerStats(outlook=Outlook(drain_rate=1.0, typical_answer=4.0))
    door = Door(OPTIONS, ManualClock(), Random(0), lambda: stats)
    assert door.outlook().queue_seconds == 0.0
    work = door.admit(new_request("a", 6))
    assert door.outlook().queue_seconds == 10.0
    assert door.under_way == (1, 6)
    door.answered(work)
    assert door.outlook() == stats.outlook
    door.admit(new_request("b", 6))
    door.forget_all()
    assert door.under_way == (0, 0)


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 100),
    st.lists(st.tuples(st.floats(0, 1e3), st.floats(-1.0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=30),
)
def test_a_time_to_return_is_bounded_and_the_same_for_the_same_seed(
    seed: int, refusals: list[tuple[float, float, float]]
) -> None:
    times, again, now = RetryTimes(Random(seed)), RetryTimes(Random(seed)), 0.0
    for passed, wait, own in refusals:
        now += passed
        seconds = times.seconds(now, wait, own)
        assert LEAST_SECONDS <= seconds <= MOST_SECONDS
        assert seconds == again.seconds(now, wait, own)


def test_clients_that_are_refused_together_do_not_return_together() -> None:
    times = RetryTimes(Random(3))
    waits = [times.seconds(0.0, 1.0, 0.0) for _ in range(50)]
    assert len(set(waits)) == 50
    assert max(waits) - min(waits) > 0.1
