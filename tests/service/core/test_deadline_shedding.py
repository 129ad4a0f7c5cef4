"""Deadlines under load, on the scheduler that serves with a virtual clock: who is served, shed, let wait."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from pageturner.policies import registry
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.scheduling.deadline_gate import DeadlineGate
from pageturner.service.core.scheduling.deadlines import Deadlines
from pageturner.service.errors import DeadlineTooClose, DeadlineUnreachable
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.simulation import SimulatedRequest, simulate
from pageturner.service.simulator.step_time import StepTimeModel
from pageturner.service.simulator.synthetic import Synthetic

MACHINE = SimulatedMachine(
    "test",
    (),
    StepTimeModel(a_step=0.02, a_token=0.001, a_sample=0.0005),
    block_bytes=1 << 18,
    cache=CacheOptions(num_blocks=1000, block_size=16),
    scheduler=SchedulerOptions(max_num_seqs=32),
)
"""Of 64 + 32 tokens it serves 7 requests a second, 32 at a time, which then take 4.5 seconds each."""

LOAD = Synthetic(prompt=64, prompt_sigma=0.0, output=32, output_sigma=0.0)
DEADLINE = 5.0


def serve(
    rate: float, *, is_shedding: bool = True, queue: str = "fcfs", load: Synthetic = LOAD
) -> list[SimulatedRequest]:
    """What becomes of 20 seconds of requests."""
    machine = replace(MACHINE, scheduler=replace(MACHINE.scheduler, deadline_shedding=is_shedding))
    workload = replace(load, rate=rate, requests=int(20 * rate), deadline=DEADLINE).make("test", 1)
    return list(simulate(workload, machine, registry.create_set({"queue": queue})).requests)


def goodput(requests: list[SimulatedRequest]) -> float:
    """Whole answers a second, after the first five."""
    ends = [one.ended_at for one in requests if one.error is None and one.ended_at is not None]
    return sum(5.0 <= end < 20.0 for end in ends) / 15.0


def _capacity() -> float:
    """Requests a second of a closed loop that keeps the queue full, without deadlines."""
    workload = replace(LOAD, requests=256, concurrency=64).make("test", 0)
    result = simulate(workload, MACHINE, registry.default_policies())
    ends = sorted(one.ended_at or 0.0 for one in result.requests)
    return 128 / (ends[192] - ends[64])


CAPACITY = _capacity()


@pytest.mark.parametrize("queue", ["fcfs", "earliest-deadline-first", "virtual-token-counter"])
@pytest.mark.parametrize("multiple", [1, 2, 5])
def test_most_of_the_capacity_goes_into_answers_that_end_in_time(multiple: int, queue: str) -> None:
    requests = serve(multiple * CAPACITY, queue=queue)
    assert goodput(requests) >= 0.8 * CAPACITY


def test_without_shedding_it_goes_into_answers_that_come_too_late() -> None:
    assert goodput(serve(5 * CAPACITY, is_shedding=False)) < 0.3 * CAPACITY


def test_what_is_shed_was_never_begun() -> None:
    requests = serve(5 * CAPACITY)
    shed = [one for one in requests if isinstance(one.error, DeadlineTooClose | DeadlineUnreachable)]
    assert len(shed) > len(requests) / 2
    assert not any(one.num_output_tokens for one in shed)
    causes = Counter(type(one.error).__name__ for one in requests)
    assert causes["DeadlineTooClose"] > causes["DeadlineExceeded"]


@pytest.mark.parametrize("deadline", [0.5, 5.0])
def test_nothing_is_refused_while_there_is_room(deadline: float) -> None:
    """Not even what will hardly end in time: trying takes nothing from others."""
    load = replace(LOAD, deadline=deadline)
    with_it, without = (serve(0.4 * CAPACITY, is_shedding=on, load=load) for on in (True, False))
    assert [one.error is None for one in with_it] == [one.error is None for one in without]


def test_requests_without_a_deadline_are_served_in_their_turn_beside_those_with_one() -> None:
    machine = MACHINE
    workload = replace(LOAD, rate=3 * CAPACITY, requests=300, deadline=DEADLINE).make("test", 1)
    patient = tuple(
        replace(one, deadline_seconds=None) if index % 10 == 0 else one
        for index, one in enumerate(workload.requests)
    )
    result = simulate(replace(workload, requests=patient), machine, registry.default_policies())
    served = [one for index, one in enumerate(result.requests) if index % 10 == 0]
    assert all(one.error is None for one in served)
    assert max(one.token_times[0] - one.arrived_at for one in served) < 2 * DEADLINE


def test_a_gate_that_never_holds_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers so long that 32 at once all come too late."""
    load = replace(LOAD, output=64)
    held = goodput(serve(5 * CAPACITY, load=load))
    monkeypatch.setattr(DeadlineGate, "holds", lambda self, request, starting: False)
    assert goodput(serve(5 * CAPACITY, load=load)) < 0.5 * held


def test_a_queue_that_is_not_searched_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a policy by which the door can't tell who is ahead."""
    queue = "earliest-deadline-first"
    searched = goodput(serve(5 * CAPACITY, queue=queue))
    monkeypatch.setattr(Deadlines, "_late", lambda self, now: iter(()))
    assert goodput(serve(5 * CAPACITY, queue=queue)) < 0.9 * searched
