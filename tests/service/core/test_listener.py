"""Who listens to a scheduler hears every call before and after, with its answer, error and decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.core_harness import CoreHarness

from pageturner.policies import registry
from pageturner.service.core.decisions import Admitted
from pageturner.service.core.listener import (
    AbortRequest,
    AddRequest,
    Call,
    CallOutcome,
    Expire,
    FailStep,
    PauseRequest,
    ResumeRequest,
    Schedule,
    SetPolicies,
    Update,
)
from pageturner.service.core.outputs import Acceptance, SchedulerOutput
from pageturner.service.errors import DuplicateRequest


class Listener:
    """Writes down what it hears; asserts that calls come in pairs."""

    def __init__(self) -> None:
        self.heard: list[tuple[Call, CallOutcome]] = []
        self._open: Call | None = None

    def before(self, call: Call) -> None:
        assert self._open is None
        self._open = call

    def after(self, call: Call, outcome: CallOutcome) -> None:
        assert call is self._open
        self._open = None
        self.heard.append((call, outcome))

    @property
    def kinds(self) -> list[type[Call]]:
        return [type(call) for call, _ in self.heard]


def listened() -> tuple[CoreHarness, Listener]:
    harness = CoreHarness(registry.default_policies(), num_blocks=8, block_size=2)
    listener = Listener()
    harness.scheduler.add_listener(listener)
    return harness, listener


def test_every_call_that_may_change_a_scheduler_is_heard_in_order() -> None:
    harness, listener = listened()
    name = harness.submit((0, 1, 2), max_tokens=9)
    harness.scheduler.pause_request(name)
    harness.scheduler.resume_request(name)
    harness.step()
    harness.fail()
    policies = replace(
        harness.scheduler.policy_host.policies, victim=registry.create("victim", "last-arrived", {})
    )
    harness.scheduler.set_policies(policies, harness.now)
    harness.abort(name)
    step = [Expire, Schedule, Update]
    assert listener.kinds == [
        AddRequest,
        PauseRequest,
        ResumeRequest,
        *step,
        Schedule,
        FailStep,
        SetPolicies,
        AbortRequest,
    ]


def test_an_outcome_holds_the_answer_and_the_decisions_of_its_own_call() -> None:
    harness, listener = listened()
    harness.submit((0, 1, 2), max_tokens=9)
    harness.step()
    added, _, scheduled, updated = (outcome for _, outcome in listener.heard)
    assert added == CallOutcome(Acceptance(9))
    assert isinstance(scheduled.answer, SchedulerOutput)
    assert [type(d) for d in scheduled.decisions].count(Admitted) == 1
    assert updated.decisions == ()


def test_a_refusal_is_heard_with_its_error_and_raised_all_the_same() -> None:
    harness, listener = listened()
    harness.submit((0, 1, 2), max_tokens=9)
    new = harness.records["r0"].new
    with pytest.raises(DuplicateRequest) as refused:
        harness.scheduler.add_request(new)
    assert listener.heard[-1] == (AddRequest(new), CallOutcome(error=refused.value))


def test_where_nothing_listens_no_decision_is_noted() -> None:
    harness = CoreHarness(registry.default_policies(), num_blocks=8, block_size=2)
    harness.submit((0, 1, 2), max_tokens=2)
    harness.run_to_end()
    assert harness.scheduler.state.decisions is None


def test_every_listener_hears_the_same_decisions() -> None:
    harness, first = listened()
    second = Listener()
    harness.scheduler.add_listener(second)
    harness.submit((0, 1, 2), max_tokens=2)
    harness.run_to_end()
    assert first.heard == second.heard
    assert any(outcome.decisions for _, outcome in second.heard)


def test_a_scheduler_restored_from_a_snapshot_gives_the_same_snapshot() -> None:
    harness = CoreHarness(registry.default_policies(), num_blocks=6, block_size=2, num_host_blocks=4)
    for number in range(5):
        harness.submit((0, 1, number % 3), max_tokens=6)
        harness.step()
    taken = harness.scheduler.snapshot()
    assert taken is not None
    other = CoreHarness(registry.default_policies(), num_blocks=6, block_size=2, num_host_blocks=4).scheduler
    requests = list(harness.scheduler.state.requests.values())
    for request in requests:
        for sequence in request.sequences:
            manager = harness.scheduler.manager
            other.manager.restore_tables(sequence, manager.table(sequence), manager.host_table(sequence))
    other.restore(taken, requests)
    assert other.snapshot() == taken
    other.check_integrity()


def test_there_is_no_snapshot_while_a_step_is_in_flight() -> None:
    harness = CoreHarness(registry.default_policies(), num_blocks=8, block_size=2)
    harness.submit((0, 1, 2), max_tokens=2)
    assert harness.scheduler.schedule(1.0)
    assert harness.scheduler.snapshot() is None
