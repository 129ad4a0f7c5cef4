"""The headline property, and all invariants of the design, under any moves and any policies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from support.at_length import AtLength
from support.scheduler_machine import (
    AdaptedMachine,
    ResumingMachine,
    SchedulerMachine,
    ScoringMachine,
    SwappingMachine,
    WindowMachine,
)

from pageturner.policies.interfaces import BatchSplit
from pageturner.policies.views import BatchView
from pageturner.service.core import scheduler as scheduler_module
from pageturner.service.core.request import Request
from pageturner.service.core.scheduling.decode import plan_decodes
from pageturner.service.core.scheduling.planner import Planner
from pageturner.service.core.scheduling.starvation_guard import choose_guarded
from pageturner.service.core.scheduling.state import SchedulerState
from pageturner.service.core.scheduling.step_plan import Chunk, StepPlan
from pageturner.service.policy_host.host import PolicyHost

COMMON = settings(deadline=None, suppress_health_check=list(HealthCheck))
MOST_ROUNDS = 10
"""Of random moves, until enough steps were ordinary ones: mostly one round, now and then a second."""


MACHINES: dict[type[SchedulerMachine], tuple[int, int]] = {
    SchedulerMachine: (120, 3000),
    SwappingMachine: (80, 2000),
    ResumingMachine: (40, 1500),
    ScoringMachine: (60, 2000),
    AdaptedMachine: (40, 1500),
    WindowMachine: (25, 2000),
}
"""Examples of each, in the default suite and at length."""


@pytest.mark.parametrize("machine", MACHINES)
def test_tokens_scores_and_books_are_those_of_unlimited_memory(machine: type[SchedulerMachine]) -> None:
    num_examples, _ = MACHINES[machine]
    run_state_machine_as_test(
        machine, settings=settings(COMMON, max_examples=num_examples, stateful_step_count=20)
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", MACHINES)
def test_tokens_scores_and_books_at_length(machine: type[SchedulerMachine], at_length: AtLength) -> None:
    _, num_examples = MACHINES[machine]
    at_length.run(machine, COMMON, num_examples, 50)


def spelt_out(plan: StepPlan) -> StepPlan:
    """Each decode as the chunk that it is; where a chunk's slot lies is the committer's to see."""
    decodes = tuple(Chunk(sequence, 1, is_last=True) for sequence in plan.decodes)
    chunks = tuple(replace(chunk, is_in_place=False) for chunk in plan.chunks)
    return replace(plan, chunks=decodes + chunks, decodes=())


def test_an_ordinary_step_is_planned_as_the_planner_would(monkeypatch: pytest.MonkeyPatch) -> None:
    num_compared = 0
    ask = PolicyHost.batch_split
    answers: dict[BatchView, BatchSplit] = {}

    def asked_once(host: PolicyHost, view: BatchView) -> BatchSplit:
        """Of one step: a policy that answers at random would tell both planners different things."""
        if view not in answers:
            answers[view] = ask(host, view)
        return answers[view]

    def compared(state: SchedulerState, guarded: Request | None) -> StepPlan | None:
        nonlocal num_compared
        answers.clear()
        plan = plan_decodes(state, guarded)
        if plan is not None:
            num_compared += 1
            assert spelt_out(plan) == spelt_out(Planner(state).plan(choose_guarded(state, guarded))), (
                "plan: not the planner's"
            )
        return plan

    monkeypatch.setattr(PolicyHost, "batch_split", asked_once)
    monkeypatch.setattr(scheduler_module, "plan_decodes", compared)
    for _ in range(MOST_ROUNDS):
        run_state_machine_as_test(
            SchedulerMachine, settings=settings(COMMON, max_examples=40, stateful_step_count=20)
        )
        if num_compared > 50:
            return
    raise AssertionError(f"only {num_compared} ordinary steps in {MOST_ROUNDS} rounds")
