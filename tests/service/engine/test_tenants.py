"""What a tenant may hold, and that what the ledger says it holds is what lives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pageturner.service.core.clock import ManualClock
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.engine import tenants as tenants_module
from pageturner.service.engine.tenants import Cause, Holding, TenantLedger, TenantReport
from pageturner.service.errors import InvalidArgument, PageturnerError, QueueFull, TenantLimitReached
from pageturner.service.identity import ANONYMOUS, Identity, TenantLimits

NO_LIMITS = TenantLimits()


class Bench:
    """A ledger over a queue whose figures the test sets."""

    def __init__(self, max_waiting: int = 100, max_queued_tokens: int = 10_000) -> None:
        self.clock = ManualClock(50.0)
        self.load = SchedulerStats()
        options = SchedulerOptions(max_waiting=max_waiting, max_queued_tokens=max_queued_tokens)
        self.ledger = TenantLedger(options, lambda: self.load, self.clock.now)

    def accept(self, identity: Identity, num_prompt: int = 10, num_output: int = 0) -> Holding:
        holding = self.ledger.enter(identity, num_prompt, num_output)
        try:
            self.ledger.charge(identity, holding, num_prompt, num_output)
        except PageturnerError:
            self.ledger.cancel(holding)
            raise
        return holding

    def report(self, tenant: str) -> TenantReport:
        return next(each for each in self.ledger.report(1000).tenants if each.tenant == tenant)


def alice(**limits: Any) -> Identity:
    return Identity("alice", limits=TenantLimits(**limits))


def test_concurrent_requests_are_bounded_and_free_again_at_their_end() -> None:
    bench = Bench()
    caller = alice(max_concurrent_requests=2)
    first = bench.accept(caller)
    bench.accept(caller)
    with pytest.raises(TenantLimitReached, match="2 requests of the tenant") as caught:
        bench.accept(caller)
    assert (caught.value.limit, caught.value.retry_after_seconds) == ("max_concurrent_requests", 1.0)
    bench.accept(replace(caller, tenant="bob"))
    bench.clock.advance(4.0)
    bench.ledger.end(first, 10)
    bench.accept(caller)
    with pytest.raises(TenantLimitReached) as caught:
        bench.accept(caller)
    assert caught.value.retry_after_seconds == pytest.approx(2.0)  # of two that take four seconds each
    assert bench.report("alice").refused == {Cause.CONCURRENT_REQUESTS: 2}


def test_a_tenant_that_seldom_calls_is_not_told_to_wait_for_as_long_as_it_was_away() -> None:
    bench = Bench()
    caller = alice(max_concurrent_requests=1)
    for _ in range(3):
        request = bench.accept(caller)
        bench.clock.advance(0.5)
        bench.ledger.end(request, 10)
        bench.clock.advance(300.0)
        bench.ledger.cancel(bench.ledger.enter(caller, 10))  # of no length, and no sign of any
    bench.accept(caller)
    with pytest.raises(TenantLimitReached) as caught:
        bench.accept(caller)
    assert caught.value.retry_after_seconds == pytest.approx(0.5)


def test_resumed_tokens_wait_like_a_prompts_and_are_used_where_the_scheduler_refuses_them() -> None:
    bench = Bench()
    caller = alice(max_queued_tokens=100, tokens_per_minute=1000)
    holding = bench.ledger.enter(caller, 90)
    bench.ledger.charge(caller, holding, 10, 200, 80)
    assert bench.report("alice").num_queued_tokens == 90
    with pytest.raises(TenantLimitReached, match="101 prompt tokens") as caught:
        bench.accept(caller, 11)
    assert caught.value.limit == "max_queued_tokens"
    bench.ledger.refuse(holding)
    report = bench.report("alice")
    assert (report.num_requests, report.num_queued_tokens, report.tokens_left) == (0, 0, 920.0)


def test_queued_tokens_are_bounded_until_the_first_token_and_a_lone_request_is_let_in() -> None:
    bench = Bench()
    caller = alice(max_queued_tokens=100)
    first = bench.accept(caller, 500)
    with pytest.raises(TenantLimitReached, match="510 prompt tokens") as caught:
        bench.accept(caller, 10)
    assert caught.value.limit == "max_queued_tokens"
    bench.ledger.start(first)
    bench.accept(caller, 60)
    bench.accept(caller, 40)
    with pytest.raises(TenantLimitReached):
        bench.accept(caller, 1)
    assert bench.report("alice").num_queued_tokens == 100


def test_a_prompt_that_proves_longer_than_it_seemed_is_refused_then() -> None:
    bench = Bench()
    caller = alice(max_queued_tokens=100)
    bench.accept(caller, 60)
    late = bench.ledger.enter(caller, 5)
    with pytest.raises(TenantLimitReached):
        bench.ledger.charge(caller, late, 41, 0)
    bench.ledger.cancel(late)
    assert bench.report("alice").num_queued_tokens == 60


def test_tokens_a_minute_are_taken_in_advance_and_what_was_not_used_comes_back() -> None:
    bench = Bench()
    caller = alice(tokens_per_minute=600)
    first = bench.accept(caller, 100, 400)
    assert bench.report("alice").tokens_left == 100
    with pytest.raises(TenantLimitReached) as caught:
        bench.accept(caller, 100, 40)
    assert (caught.value.limit, caught.value.retry_after_seconds) == ("tokens_per_minute", 4.0)
    bench.clock.advance(4.0)
    second = bench.accept(caller, 100, 40)
    bench.ledger.end(first, 150)
    assert bench.report("alice").tokens_left == 350
    bench.ledger.cancel(second)
    assert bench.report("alice").tokens_left == 490


def test_one_request_larger_than_a_minutes_tokens_waits_for_a_full_bucket_and_leaves_a_debt() -> None:
    bench = Bench()
    caller = alice(tokens_per_minute=600)
    bench.ledger.end(bench.accept(caller, 60), 60)
    with pytest.raises(TenantLimitReached) as caught:
        bench.accept(caller, 1000, 200)
    assert caught.value.retry_after_seconds == 6.0
    bench.clock.advance(6.0)
    bench.ledger.end(bench.accept(caller, 1000, 200), 1200)
    assert bench.report("alice").tokens_left == -600
    with pytest.raises(TenantLimitReached) as caught:
        bench.accept(caller, 1, 0)
    assert caught.value.retry_after_seconds == pytest.approx(60.2)


def test_limits_change_while_requests_run() -> None:
    bench = Bench()
    holdings = [bench.accept(alice(tokens_per_minute=600), 100) for _ in range(3)]
    assert bench.report("alice").tokens_left == 300
    with pytest.raises(TenantLimitReached):
        bench.accept(alice(max_concurrent_requests=3))
    holdings.append(bench.accept(alice(max_concurrent_requests=4)))
    assert bench.report("alice").tokens_left is None
    holdings.append(bench.accept(alice(tokens_per_minute=100), 10))
    assert bench.report("alice").tokens_left == 90
    holdings.append(bench.accept(alice(tokens_per_minute=200), 10))
    assert bench.report("alice").tokens_left == 180
    for holding in holdings:
        bench.ledger.end(holding, 100)
    assert bench.report("alice").num_requests == 0
    assert bench.report("alice").tokens_left == 180


@pytest.mark.parametrize(("asked", "given"), [(0, -1), (-3, -3), (-1, -1)])
def test_a_priority_left_open_is_the_nearest_that_is_allowed(asked: int, given: int) -> None:
    caller = alice(min_priority=-5, max_priority=-1)
    assert Bench().ledger.check(caller, SamplingParams(), asked) == given


@pytest.mark.parametrize(
    ("priority", "params", "field"),
    [
        (7, SamplingParams(), "priority"),
        (-7, SamplingParams(), "priority"),
        (0, SamplingParams(max_tokens=51), "max_tokens"),
        (0, SamplingParams(min_tokens=51), "min_tokens"),
    ],
)
def test_what_waiting_would_not_help_is_an_invalid_argument(
    priority: int, params: SamplingParams, field: str
) -> None:
    bench = Bench()
    caller = alice(min_priority=-5, max_priority=5, max_tokens=50)
    with pytest.raises(InvalidArgument) as caught:
        bench.ledger.check(caller, params, priority)
    assert caught.value.field == field
    assert sum(bench.ledger.report(1).refused.values()) == 1


def fill(bench: Bench, tenant: str, num_prompt: int = 1) -> int:
    """How many requests of a tenant find a place in the queue, which nothing leaves."""
    for count in range(10_000):
        try:
            bench.accept(Identity(tenant), num_prompt)
        except QueueFull:
            return count
        waiting, tokens = bench.load.num_waiting + 1, bench.load.num_queued_prompt_tokens + num_prompt
        bench.load = replace(bench.load, num_waiting=waiting, num_queued_prompt_tokens=tokens)
    raise AssertionError("the queue has no bound")


def test_a_flood_leaves_room_in_the_queue_for_tenants_to_come() -> None:
    bench = Bench(max_waiting=100)
    assert [fill(bench, name) for name in "abc"] == [80, 16, 4]
    bench = Bench(max_queued_tokens=1000)
    assert fill(bench, "a", 10) == 80
    assert fill(bench, "b", 10) == 16
    assert bench.report("a").refused == {Cause.QUEUE_SHARE: 1}


def test_texts_a_minute_are_taken_whatever_comes_of_them() -> None:
    bench = Bench()
    caller = alice(tokenized_per_minute=600, tokens_per_minute=60)
    bench.ledger.take_text(caller, 590)
    with pytest.raises(TenantLimitReached, match="20 characters or ids; 10 are left of 600") as caught:
        bench.ledger.take_text(caller, 20)
    assert (caught.value.limit, caught.value.retry_after_seconds) == ("tokenized_per_minute", 1.0)
    bench.clock.advance(1.0)
    bench.ledger.take_text(caller, 20)
    assert bench.report("alice").tokens_left == 60  # a bucket of its own
    bench.clock.advance(60.0)
    bench.ledger.take_text(caller, 6000)  # more than a bucket: let in when it is full, and owed
    bench.clock.advance(100.0)
    with pytest.raises(TenantLimitReached):
        bench.ledger.take_text(alice(tokenized_per_minute=600), 1)
    bench.ledger.take_text(alice(), 1 << 20)
    bench.ledger.take_text(ANONYMOUS, 1 << 20)
    assert bench.report("alice").refused == {Cause.TOKENIZED_PER_MINUTE: 2}


def test_without_authentication_nothing_is_bounded() -> None:
    bench = Bench(max_waiting=4)
    for _ in range(10):
        bench.accept(ANONYMOUS, 10_000, 10_000)
    assert bench.report("").num_requests == 10


def test_tenants_that_came_and_went_are_forgotten_once_their_buckets_are_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tenants_module, "MAX_IDLE_ACCOUNTS", 8)
    bench = Bench()
    limits = TenantLimits(tokens_per_minute=60, tokenized_per_minute=60)
    kept = bench.accept(Identity("kept"))
    for number in range(50):
        caller = Identity(f"t{number}", limits=limits)
        bench.ledger.end(bench.accept(caller, 60), 60)
        with pytest.raises(TenantLimitReached):
            bench.accept(caller, 1)
    assert bench.ledger.report(0).num_tenants == 51  # each owes, and would be forgiven
    bench.clock.advance(60.0)
    for number in range(50, 100):
        bench.ledger.end(bench.accept(Identity(f"t{number}")), 10)
    report = bench.ledger.report(3)
    assert report.num_tenants <= 10
    assert (report.tenants[0].tenant, report.tenants[0].num_requests) == ("kept", 1)
    assert report.refused == {Cause.TOKENS_PER_MINUTE: 50}
    bench.ledger.cancel(kept)


@dataclass
class Live:
    tenant: str
    num_prompt: int
    num_output: int
    holding: Holding
    is_waiting: bool = True


class LedgerMachine(RuleBasedStateMachine):
    """Requests of three tenants come, start and end in every way, while limits change and time passes."""

    tenant = st.sampled_from(["", "a", "b"])
    limits = st.builds(
        TenantLimits,
        max_concurrent_requests=st.none() | st.integers(1, 4),
        max_queued_tokens=st.none() | st.integers(1, 200),
        tokens_per_minute=st.none() | st.integers(1, 2000),
    )

    @initialize()
    def begin(self) -> None:
        self.bench = Bench(max_waiting=12, max_queued_tokens=400)
        self.limits_of = {"": NO_LIMITS, "a": NO_LIMITS, "b": NO_LIMITS}
        self.live: list[Live] = []

    def identity(self, tenant: str) -> Identity:
        return Identity(tenant, limits=self.limits_of[tenant])

    def of(self, tenant: str) -> list[Live]:
        return [live for live in self.live if live.tenant == tenant]

    @rule(tenant=st.sampled_from(["a", "b"]), limits=limits)
    def reload(self, tenant: str, limits: TenantLimits) -> None:
        self.limits_of[tenant] = limits

    @rule(seconds=st.floats(0.0, 90.0))
    def wait(self, seconds: float) -> None:
        self.bench.clock.advance(seconds)

    @rule(tenant=tenant, num_prompt=st.integers(1, 150), num_output=st.integers(0, 300))
    def submit(self, tenant: str, num_prompt: int, num_output: int) -> None:
        limits, mine = self.limits_of[tenant], self.of(tenant)
        queued = sum(live.num_prompt for live in mine if live.is_waiting)
        before = self.bench.ledger.report(9)
        try:
            holding = self.bench.ledger.enter(self.identity(tenant), (num_prompt + 1) // 2)
        except QueueFull:
            assert tenant, "a request without a tenant was refused by a tenant's bound"
            assert sum(self.bench.ledger.report(9).refused.values()) == sum(before.refused.values()) + 1
            return
        assert limits.max_concurrent_requests is None or len(mine) < limits.max_concurrent_requests
        try:
            self.bench.ledger.charge(self.identity(tenant), holding, num_prompt, num_output)
        except TenantLimitReached:
            self.bench.ledger.cancel(holding)
            self.bench.ledger.cancel(holding)  # no harm
            return
        assert (
            limits.max_queued_tokens is None or not queued or queued + num_prompt <= limits.max_queued_tokens
        )
        self.live.append(Live(tenant, num_prompt, num_output, holding))

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99))
    def start(self, pick: int) -> None:
        live = self.live[pick % len(self.live)]
        if live.is_waiting:
            live.is_waiting = False
            self.bench.ledger.start(live.holding)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99), share=st.floats(0.0, 1.0), is_accepted=st.booleans())
    def finish(self, pick: int, share: float, is_accepted: bool) -> None:
        live = self.live.pop(pick % len(self.live))
        if is_accepted:
            self.bench.ledger.end(live.holding, live.num_prompt + int(share * live.num_output))
        else:
            self.bench.ledger.cancel(live.holding)

    @invariant()
    def what_is_held_is_what_lives(self) -> None:
        reports = {report.tenant: report for report in self.bench.ledger.report(9).tenants}
        for tenant, report in reports.items():
            mine = self.of(tenant)
            waiting = [live for live in mine if live.is_waiting]
            assert report.num_requests == len(mine)
            assert report.num_waiting == len(waiting)
            assert report.num_queued_tokens == sum(live.num_prompt for live in waiting)
            rate = report.limits.tokens_per_minute
            assert (report.tokens_left is None) == (rate is None)
            if report.tokens_left is not None and rate is not None:
                assert -450 <= report.tokens_left <= rate + 1e-6  # no debt over one request's size
        assert {live.tenant for live in self.live} <= reports.keys()

    def teardown(self) -> None:
        for live in getattr(self, "live", ()):
            self.bench.ledger.end(live.holding, 0)
        if hasattr(self, "bench"):
            for report in self.bench.ledger.report(9).tenants:
                assert (report.num_requests, report.num_waiting, report.num_queued_tokens) == (0, 0, 0)


COMMON = settings(deadline=None, suppress_health_check=list(HealthCheck))


def test_what_the_ledger_holds_is_what_lives() -> None:
    run_state_machine_as_test(
        LedgerMachine, settings=settings(COMMON, max_examples=60, stateful_step_count=30)
    )


@pytest.mark.parametrize("method", ["start", "end", "cancel"])
def test_a_ledger_that_forgets_an_end_is_caught(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TenantLedger, method, lambda *arguments: None)
    one_bug = settings(
        COMMON,
        max_examples=60,
        stateful_step_count=30,
        database=None,
        phases=(Phase.generate,),
        report_multiple_bugs=False,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(LedgerMachine, settings=one_bug)
