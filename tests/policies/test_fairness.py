"""Virtual token counters: the published bound on the gap between tenants, lifts, weights, and what is free.

The server loop here is the one that the paper argues about: requests run to their end once started, the
pool is booked for prompt and outputs when a request starts, and no request is preempted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.policy_views import LOAD, REQUEST, request, victim

from pageturner.policies.errors import PolicyOptionError
from pageturner.policies.events import (
    PolicyEvent,
    RequestEnded,
    RequestQueued,
    RequestStarted,
    StepServed,
    TenantShare,
)
from pageturner.policies.frozen_map import FrozenMap
from pageturner.policies.interfaces import Migrating, is_stateful
from pageturner.policies.queue import Fcfs, VirtualTokenCounter
from pageturner.policies.service_counters import NOTHING_SERVED, ServiceCounters, _least_waiting
from pageturner.policies.victim import LastArrived, MostOverServed
from pageturner.policies.views import RequestView

INPUT, OUTPUT = 1.0, 2.0


@dataclass(frozen=True)
class Job:
    """A request to the little server: its tenant always has another one behind it."""

    request_id: str
    tenant: str
    num_prompt: int
    num_output: int
    view: RequestView


@dataclass
class Server:
    """pool: tokens that all running requests may hold. at_once: how many start between looks at the keys."""

    policy: Any
    pool: int
    at_once: int = 1
    state: Any = None
    waiting: list[Job] = field(default_factory=list)
    running: list[list[Any]] = field(default_factory=list)  # [job, outputs so far]
    service: dict[str, float] = field(default_factory=dict)
    ids: Any = field(default_factory=count)

    def __post_init__(self) -> None:
        if is_stateful(self.policy):
            self.state = self.policy.initial_state()

    def tell(self, event: PolicyEvent) -> None:
        if is_stateful(self.policy):
            self.state = self.policy.fold(self.state, event)

    def submit(self, tenant: str, num_prompt: int, num_output: int) -> None:
        number = next(self.ids)
        view = request(f"r{number}", tenant=tenant, arrival_time=float(number))
        job = Job(view.request_id, tenant, num_prompt, num_output, view)
        self.waiting.append(job)
        self.tell(RequestQueued(0.0, job.request_id, tenant, num_prompt, is_first=True))

    def key(self, job: Job) -> Any:
        return self.policy.key(job.view, LOAD, **({} if self.state is None else {"state": self.state}))

    def start_some(self) -> None:
        """Start requests in the order of their keys until one does not fit."""
        while self.waiting:
            for job in sorted(self.waiting, key=self.key)[: self.at_once]:
                held = sum(job.num_prompt + job.num_output for job, _ in self.running)
                if held + job.num_prompt + job.num_output > self.pool:
                    return
                self.waiting.remove(job)
                self.running.append([job, 0])
                self.serve(job.tenant, INPUT * job.num_prompt)
                self.tell(RequestStarted(0.0, job.request_id, job.tenant, job.num_prompt, 0, is_first=True))

    def step(self) -> None:
        """One output token for every running request."""
        outputs: dict[str, int] = {}
        for entry in self.running:
            entry[1] += 1
            outputs[entry[0].tenant] = outputs.get(entry[0].tenant, 0) + 1
        for tenant, number in outputs.items():
            self.serve(tenant, OUTPUT * number)
        for job in [job for job, done in self.running if done == job.num_output]:
            self.tell(RequestEnded(0.0, job.request_id, job.tenant))
        self.running = [entry for entry in self.running if entry[1] < entry[0].num_output]
        shares = tuple(TenantShare(tenant, 0, outputs[tenant], 0) for tenant in sorted(outputs))
        self.tell(StepServed(0.0, shares))

    def serve(self, tenant: str, cost: float) -> None:
        self.service[tenant] = self.service.get(tenant, 0.0) + cost


Shape = tuple[int, int]
"""Prompt and output tokens of one request."""


def widest_gap(
    policy: Any,
    pool: int,
    shapes: Mapping[str, Sequence[Shape]],
    *,
    weights: Mapping[str, float] = MappingProxyType({}),
    at_once: int = 1,
    num_steps: int = 60,
) -> float:
    """The largest difference between what two always backlogged tenants got in any interval, per weight."""
    server = Server(policy, pool, at_once)
    least, most = 0.0, 0.0
    most_starts = pool // 2 + 1  # a request is two tokens at the least: no tenant's queue runs dry in a step
    positions = dict.fromkeys(shapes, 0)
    for _ in range(num_steps):
        for tenant, its_shapes in shapes.items():
            while sum(job.tenant == tenant for job in server.waiting) < most_starts:
                server.submit(tenant, *its_shapes[positions[tenant] % len(its_shapes)])
                positions[tenant] += 1
        server.start_some()
        server.step()
        one, other = (server.service.get(tenant, 0.0) / weights.get(tenant, 1.0) for tenant in shapes)
        least, most = min(least, one - other), max(most, one - other)
    return most - least


POOL = 32
shape = st.tuples(st.integers(1, 12), st.integers(1, 12))
shape_lists = st.lists(shape, min_size=1, max_size=5)


def bound(pool: int, shapes: Sequence[Shape], least_weight: float = 1.0) -> float:
    """Theorem 4.4: 2 max(w_in x longest prompt, w_out x tokens in the pool); of weighted tenants the most."""
    longest = max(num_prompt for num_prompt, _ in shapes)
    return 2 * max(INPUT * longest, OUTPUT * pool) / least_weight


@settings(max_examples=60, deadline=None)
@given(one=shape_lists, other=shape_lists, at_once=st.sampled_from([1, 3]))
def test_the_service_gap_of_backlogged_tenants_stays_within_the_published_bound(
    one: list[Shape], other: list[Shape], at_once: int
) -> None:
    gap = widest_gap(VirtualTokenCounter(INPUT, OUTPUT), POOL, {"a": one, "b": other}, at_once=at_once)
    assert gap <= bound(POOL, one + other)


@settings(max_examples=40, deadline=None)
@given(one=shape_lists, other=shape_lists, weight=st.sampled_from([0.5, 2.0, 5.0]))
def test_weights_divide_the_service(one: list[Shape], other: list[Shape], weight: float) -> None:
    policy = VirtualTokenCounter(INPUT, OUTPUT, f"b={weight}")
    gap = widest_gap(policy, POOL, {"a": one, "b": other}, weights={"b": weight})
    assert gap <= bound(POOL, one + other, min(1.0, weight))


def test_first_come_first_served_breaks_the_bound() -> None:
    """So the bound says something: many small requests against few large ones, turn by turn."""
    shapes = {"a": [(1, 1)], "b": [(12, 12)]}
    assert widest_gap(Fcfs(), POOL, shapes) > bound(POOL, [(12, 12)])
    assert widest_gap(VirtualTokenCounter(INPUT, OUTPUT), POOL, shapes) <= bound(POOL, [(12, 12)])


# --- one rule a test -----------------------------------------------------------------------

VTC = VirtualTokenCounter(INPUT, OUTPUT)


def told(*events: PolicyEvent, policy: VirtualTokenCounter = VTC) -> ServiceCounters:
    state = policy.initial_state()
    for event in events:
        state = policy.fold(state, event)
    return state


def queued(request_id: str, tenant: str, num_prompt: int = 10, *, is_first: bool = True) -> RequestQueued:
    return RequestQueued(0.0, request_id, tenant, num_prompt, is_first)


def started(request_id: str, tenant: str, num_prompt: int = 10, **changes: Any) -> RequestStarted:
    event = RequestStarted(0.0, request_id, tenant, num_prompt, num_cached_tokens=0, is_first=True)
    return replace(event, **changes)


def served(tenant: str, num_outputs: int, num_recomputed: int = 0) -> StepServed:
    return StepServed(0.0, (TenantShare(tenant, 0, num_outputs, num_recomputed),))


def ended(request_id: str, tenant: str) -> RequestEnded:
    return RequestEnded(0.0, request_id, tenant)


def test_a_prompt_is_charged_when_it_starts_and_outputs_as_they_come() -> None:
    state = told(queued("r", "a", 10))
    assert state.counter("a") == 0
    state = VTC.fold(state, started("r", "a", 10))
    assert state.counter("a") == 10
    assert VTC.fold(state, served("a", 3)).counter("a") == 16


def test_what_the_cache_held_is_free() -> None:
    assert told(queued("r", "a", 10), started("r", "a", 10, num_cached_tokens=8)).counter("a") == 2


def test_what_is_computed_again_is_free() -> None:
    once = told(queued("r", "a"), started("r", "a"), served("a", 1))
    again: list[PolicyEvent] = [
        queued("r", "a", is_first=False),
        started("r", "a", is_first=False),
        served("a", 0, 11),
    ]
    state = once
    for event in again:
        state = VTC.fold(state, event)
    assert state.counter("a") == once.counter("a") == 12


def test_a_tenant_that_was_idle_is_lifted_to_the_least_counter_that_waits() -> None:
    busy = told(queued("a1", "a"), queued("a2", "a"), started("a1", "a"))
    assert VTC.fold(busy, queued("b1", "b")).counter("b") == 10


def test_a_lift_never_lowers() -> None:
    state = told(queued("a1", "a"), queued("b1", "b"), started("b1", "b"), served("b", 50), ended("b1", "b"))
    assert VTC.fold(state, queued("b2", "b")).counter("b") == 110


def test_with_no_tenant_waiting_the_lift_is_to_the_one_that_left_the_queue_last() -> None:
    assert told(queued("a1", "a"), started("a1", "a"), served("a", 2), queued("b1", "b")).counter("b") == 14


def test_a_tenant_that_is_in_the_queue_is_not_lifted() -> None:
    state = told(
        queued("b1", "b"), queued("a1", "a"), started("a1", "a"), queued("a2", "a"), queued("b2", "b")
    )
    assert state.counter("b") == 0


def key(state: ServiceCounters, request_id: str, tenant: str, arrival: float = 0.0) -> Any:
    return VTC.key(request(request_id, tenant=tenant, arrival_time=arrival), LOAD, state=state)


def test_one_look_at_the_queue_interleaves_the_tenants() -> None:
    names = ["a1", "a2", "a3", "b1", "b2"]
    state = told(*(queued(name, name[0]) for name in names))
    order = sorted(names, key=lambda name: key(state, name, name[0], names.index(name)))
    assert order == ["a1", "b1", "a2", "b2", "a3"]


def test_to_start_the_first_of_a_tenant_leaves_the_keys_of_its_others() -> None:
    state = told(queued("a1", "a"), queued("a2", "a"), queued("a3", "a"))
    before = [key(state, "a2", "a"), key(state, "a3", "a")]
    state = VTC.fold(state, started("a1", "a"))
    assert [key(state, "a2", "a"), key(state, "a3", "a")] == before


def test_a_preempted_request_goes_ahead_of_its_tenants_others() -> None:
    state = told(queued("a1", "a"), started("a1", "a"), queued("a2", "a"), queued("a3", "a"))
    state = VTC.fold(state, queued("a1", "a", is_first=False))
    assert key(state, "a1", "a") < key(state, "a3", "a")
    assert key(state, "a1", "a")[0] == state.counter("a")


def test_cancelled_requests_leave_no_debt() -> None:
    state = told(*(queued(f"a{number}", "a") for number in range(5)))
    for number in range(1, 4):
        state = VTC.fold(state, ended(f"a{number}", "a"))
    state = VTC.fold(state, queued("a9", "a"))
    assert key(state, "a9", "a")[0] == 20, "behind a0 and a4"


def test_tenants_that_are_gone_are_forgotten_and_none_escapes_its_debt() -> None:
    debts = (queued("d", "debtor"), started("d", "debtor"), served("debtor", 1000), ended("d", "debtor"))
    state = told(queued("w", "waits"), *debts)
    for number in range(500):
        name = f"t{number}"
        for event in (queued(name, name), started(name, name, 0), ended(name, name)):
            state = VTC.fold(state, event)
    assert len(state.accounts) < 200
    assert state.counter("debtor") == 2010


def test_a_memory_begun_among_live_requests_counts_from_zero_and_knows_those_that_wait() -> None:
    """As a live swap tells it: those that run are charged for outputs from now on."""
    running: list[PolicyEvent] = [queued("a1", "a", is_first=False), started("a1", "a", is_first=False)]
    state = told(*running, queued("a2", "a"), queued("b1", "b", is_first=False))
    assert state.counter("a") == state.counter("b") == 0
    assert key(state, "b1", "b") == key(state, "a2", "a") == (0.0, 0.0)
    state = VTC.fold(VTC.fold(state, served("a", 1)), ended("a1", "a"))
    assert (state.counter("a"), state.account("a").num_running) == (2, 0)


TENANTS = ("a", "b", "c", "d")
IDS, COUNTS = st.integers(0, 9), st.integers(1, 9)


def tenant_of(number: int) -> str:
    return TENANTS[number % 4]


@given(
    st.lists(
        st.one_of(
            st.builds(lambda i, n: queued(f"r{i}", tenant_of(i), n), IDS, COUNTS),
            st.builds(lambda i: started(f"r{i}", tenant_of(i)), IDS),
            st.builds(lambda i: RequestEnded(0.0, f"r{i}", tenant_of(i)), IDS),
            st.builds(served, st.sampled_from(TENANTS), COUNTS),
        ),
        max_size=60,
    )
)
def test_the_least_waiting_counter_is_found_after_any_events(events: list[PolicyEvent]) -> None:
    state = NOTHING_SERVED
    for event in events:
        state = VTC.fold(state, event)
        waiting = [account.counter for account in state.accounts.values() if account.num_waiting]
        tidied, least = _least_waiting(state)
        assert least == min(waiting, default=state.counter(state.last_left))
        assert all(account.counter == tidied.counter(tenant) for tenant, account in state.accounts.items())
        assert len(state.waiting) <= len(TENANTS), "one entry a tenant"


@pytest.mark.fault("R")
def test_a_submission_looks_at_few_tenants_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    state = told(*(queued(f"r{i}", f"t{i}") for i in range(1024)))
    looks = passes = 0
    get, items = FrozenMap.get, FrozenMap.items

    def counted(self: FrozenMap[Any, Any], key: Any) -> Any:
        nonlocal looks
        looks += 1
        return get(self, key)

    def passing(self: FrozenMap[Any, Any]) -> Any:
        nonlocal passes
        passes += 1
        return items(self)

    monkeypatch.setattr(FrozenMap, "get", counted)
    monkeypatch.setattr(FrozenMap, "items", passing)
    for i in range(100):
        state = VTC.fold(state, queued(f"late{i}", f"late{i}"))
    assert looks <= 100 * 12
    assert passes <= 1, "accounts are pruned whenever they have doubled, and looked through at no other time"


@pytest.mark.fault("R")
def test_weights_of_tenants_are_bounded() -> None:
    with pytest.raises(PolicyOptionError, match="characters; at most 65536"):
        VirtualTokenCounter(tenant_weights="gold=4, " * 10_000)


def test_states_of_both_policies_outlive_a_change_of_options() -> None:
    state = told(queued("r", "a"), started("r", "a"))
    for other in (VirtualTokenCounter(tenant_weights="a=2"), MostOverServed()):
        assert isinstance(other, Migrating)
        assert other.migrate(state) is state
        assert other.migrate("something else") is None
    assert not is_stateful(LastArrived())


def test_the_most_over_served_yields_within_the_lowest_priority() -> None:
    policy = MostOverServed(INPUT, OUTPUT)
    state = told(queued("r", "rich"), started("r", "rich"), served("rich", 5))
    assert state != NOTHING_SERVED
    rich, poor = victim("rich"), victim("poor", arrival_time=5.0)
    rich = replace(rich, request=replace(rich.request, tenant="rich"))
    urgent = replace(rich, request=replace(rich.request, request_id="urgent", priority=1))
    assert list(policy.rank((poor, urgent, rich), REQUEST, LOAD, state=state)) == ["rich", "poor", "urgent"]
    assert list(policy.rank((poor, urgent, rich), REQUEST, LOAD)) == ["poor", "rich", "urgent"]
