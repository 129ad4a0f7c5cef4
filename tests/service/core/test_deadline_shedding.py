"""Deadlines under load, on the scheduler that serves with a virtual clock: who is served, shed, let wait."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from pageturner.policies import registry
from pageturner.service.core.options import CacheOptions, SchedulerOptions, SpeculationOptions
from pageturner.service.core.outlook import NO_DRAFTING
from pageturner.service.core.scheduling import forecast
from pageturner.service.core.scheduling.deadline_gate import DeadlineGate
from pageturner.service.core.scheduling.deadlines import Deadlines
from pageturner.service.core.scheduling.pace import Pace
from pageturner.service.errors import DeadlineTooClose, DeadlineUnreachable
from pageturner.service.simulator.acceptance import Acceptance
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.outcomes import SimulatedRequest
from pageturner.service.simulator.simulation import simulate
from pageturner.service.simulator.step_time import StepTimeModel
from pageturner.service.simulator.synthetic import Synthetic
from pageturner.service.simulator.workload import Segment, SimulatedWorkload, WorkloadRequest

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


# --- answers that are guessed ----------------------------------------------------------------

GUESSED = replace(
    MACHINE,
    step_time=StepTimeModel(a_step=0.1, a_token=0.001, a_sample=0.0005),
    speculation=SpeculationOptions("ngram"),
)
"""A token a step makes an answer of 64 tokens 6.4 seconds long, guesses as short as one."""


def guessed(rate: float) -> float:
    """Goodput of answers that repeat their prompts."""
    load = replace(LOAD, output=64, rate=rate, requests=int(20 * rate), deadline=DEADLINE)
    workload = replace(load.make("test", 1), acceptance=Acceptance(repeating=1.0))
    return goodput(list(simulate(workload, GUESSED, registry.default_policies()).requests))


def test_deadlines_are_reckoned_with_the_tokens_that_guesses_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a token a step each would be late in any case, so that none is kept from making others late."""
    reckoned = guessed(12.0)
    monkeypatch.setattr(forecast, "drafting_of", lambda pace, sequence: NO_DRAFTING)
    monkeypatch.setattr(Pace, "usual_drafting", property(lambda self: NO_DRAFTING))
    assert reckoned > 2 * guessed(12.0)


# --- requests of another kind beside ---------------------------------------------------------


def served_beside_hogs() -> int:
    """Of small requests at the capacity, those that end in time after four of 1,500 tokens have come."""
    starts = Synthetic(rate=1.1 * CAPACITY, requests=int(24 * CAPACITY)).make("test", 0).requests
    shapes: list[tuple[float, int, int, float | None]] = [
        (one.at_seconds, 64, 32, DEADLINE) for one in starts
    ]
    shapes += [(8.0 + 0.01 * number, 1500, 200, None) for number in range(4)]
    requests = tuple(
        WorkloadRequest(
            at, (Segment(2 * n + 1, prompt),), Segment(2 * n + 2, output), deadline_seconds=deadline
        )
        for n, (at, prompt, output, deadline) in enumerate(sorted(shapes, key=lambda shape: shape[0]))
    )
    machine = replace(
        MACHINE,
        cache=replace(MACHINE.cache, num_blocks=4000),
        scheduler=replace(MACHINE.scheduler, max_model_len=4096),
    )
    found = simulate(SimulatedWorkload("test", requests), machine, registry.default_policies()).requests
    return sum(one.error is None and one.arrived_at > 8.0 for one in found if one.num_prompt_tokens == 64)


def test_what_comes_is_reckoned_with_beside_its_like_and_not_beside_the_hogs_of_the_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = served_beside_hogs()
    monkeypatch.setattr(Pace, "prompt_ratio", None)  # that of those that run is taken
    assert served > 1.05 * served_beside_hogs()


# --- planted bugs ----------------------------------------------------------------------------


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
