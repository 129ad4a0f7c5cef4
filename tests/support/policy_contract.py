"""The contract that a policy of each axis keeps, as checks that anybody may run on their own.

    from support.policy_contract import check_policy
    check_policy("victim", MyVictimPolicy(patience=3))

It shows the policy whatever the core could show it, and demands: no exception; the same answer to the
same question; an answer of the right shape; a frozen, hashable value; options that survive the registry.
A policy with a memory is told any events in any order, and must keep all that with whatever it remembers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pageturner.policies import registry
from pageturner.policies.events import PolicyEvent
from pageturner.policies.interfaces import (
    Admission,
    AdmissionPolicy,
    BatchPolicy,
    BatchSplit,
    EvictionPolicy,
    KeyChange,
    QueuePolicy,
    Reclaim,
    ReclaimPolicy,
    Stateful,
    VictimPolicy,
    is_stateful,
)
from pageturner.policies.views import (
    AdmissionView,
    BatchView,
    BlockView,
    LoadView,
    Rates,
    RequestView,
    VictimView,
)
from support.policy_views import (
    admission_views,
    batch_views,
    block_views,
    counts,
    event_lists,
    load_views,
    rates,
    request_views,
    victim_lists,
    victim_views,
)

CONTRACT = settings(
    max_examples=60,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)
FIRST_FAULT = settings(CONTRACT, derandomize=True, phases=(Phase.generate,))
"""Does it fail at all? Without the work of finding the smallest view that shows it."""


def check_policy(axis: str, policy: Any) -> None:
    """Raise AssertionError, or what the policy raised, unless it keeps the contract of its axis."""
    check_value(policy)
    check_options(axis, policy)
    CHECKS[axis](policy)
    if is_stateful(policy):
        check_memory(policy)


def check_value(policy: Any) -> None:
    """It is a frozen dataclass, hashable, equal to a copy of itself."""
    parameters = getattr(type(policy), "__dataclass_params__", None)
    assert parameters is not None, "a policy is a dataclass"
    assert parameters.frozen, "a policy is frozen"
    copy = dataclasses.replace(policy)
    assert copy == policy
    assert hash(copy) == hash(policy)


def check_options(axis: str, policy: Any) -> None:
    """Its name and options give it back."""
    made = registry.create(axis, registry.name_of(policy), registry.options_of(policy))
    assert made == policy


def check_memory(policy: Stateful[Any], profile: settings = CONTRACT) -> None:
    """States are frozen values; `fold` takes any event, and the same ones always lead to equal states."""
    assert policy.initial_state() == policy.initial_state()

    @profile
    @given(event_lists)
    def check(events: list[PolicyEvent]) -> None:
        states = [policy.initial_state()]
        for event in events:
            before = repr(states[-1])
            states.append(policy.fold(states[-1], event))
            assert repr(states[-2]) == before, "a fold changed the state it was given"
        for state in states:
            parameters = getattr(type(state), "__dataclass_params__", None)
            assert parameters is not None, "a state is a dataclass"
            assert parameters.frozen, "a state is frozen"
        for before, event, after in zip(states, events, states[1:], strict=False):
            assert policy.fold(before, event) == after, "the same event, another state"

    check()


def memories(policy: object) -> st.SearchStrategy[Any]:
    """Any state the policy may come to; None if it has no memory."""
    if not isinstance(policy, Stateful):
        return st.none()
    return event_lists.map(lambda events: functools.reduce(policy.fold, events, policy.initial_state()))


def asking(method: Callable[..., Any], state: Any) -> Callable[..., Any]:
    """The decision method as the core asks it: with the memory, if there is one."""
    return method if state is None else functools.partial(method, state=state)


def check_queue(policy: QueuePolicy, profile: settings = CONTRACT) -> None:
    """Keys are tuples, finite, comparable with each other, and change only as the policy declares."""
    assert isinstance(policy.key_change, KeyChange)

    @profile
    @given(st.lists(request_views(), min_size=2, max_size=4), load_views(), load_views(), memories(policy))
    def check(requests: list[RequestView], load: LoadView, later: LoadView, state: Any) -> None:
        ask = asking(policy.key, state)
        keys = [ask(request, load) for request in requests]
        assert keys == [ask(request, load) for request in requests], "the same question, another answer"
        for key in keys:
            assert isinstance(key, tuple)
            assert not any(isinstance(part, float) and not math.isfinite(part) for part in key), key
        sorted(keys)  # raises where two keys cannot be compared
        if policy.key_change is not KeyChange.WITH_TIME:
            assert keys == [ask(request, later) for request in requests], "the key depends on the load"
            assert not is_stateful(policy), "a key that follows a memory changes with time"
        if policy.key_change is KeyChange.NEVER:
            progressed = [
                dataclasses.replace(
                    request,
                    num_tokens=request.num_tokens + 1,
                    num_output_tokens=request.num_output_tokens + 1,
                    num_uncomputed_tokens=0,
                    num_cached_tokens=0,
                    num_preemptions=request.num_preemptions + 1,
                    num_bypasses=request.num_bypasses + 1,
                )
                for request in requests
            ]
            assert keys == [ask(request, later) for request in progressed], "the key depends on progress"

    check()


def check_admission(policy: AdmissionPolicy, profile: settings = CONTRACT) -> None:
    """It answers with an Admission."""

    @profile
    @given(admission_views(), load_views(), memories(policy))
    def check(candidate: AdmissionView, load: LoadView, state: Any) -> None:
        ask = asking(policy.decide, state)
        answer = ask(candidate, load)
        assert isinstance(answer, Admission)
        assert answer is ask(candidate, load), "the same question, another answer"

    check()


def check_batch(policy: BatchPolicy, profile: settings = CONTRACT) -> None:
    """Shares are whole, not negative, within the budget, and let some work that is there be done."""

    @profile
    @given(batch_views, memories(policy))
    def check(batch: BatchView, state: Any) -> None:
        ask = asking(policy.split, state)
        split = ask(batch)
        assert split == ask(batch), "the same question, another answer"
        assert isinstance(split, BatchSplit)
        assert type(split.decode_tokens) is int
        assert type(split.prefill_tokens) is int
        assert split.decode_tokens >= 0
        assert split.prefill_tokens >= 0
        assert split.decode_tokens + split.prefill_tokens <= batch.token_budget
        if split.chunk_tokens is not None:
            assert type(split.chunk_tokens) is int
            assert split.chunk_tokens >= 1
        num_decoded = min(split.decode_tokens, batch.num_decode_tokens)
        num_prefilled = min(split.prefill_tokens, sum(batch.prefill_tokens))
        if batch.token_budget and (batch.num_decode_tokens or batch.prefill_tokens):
            assert num_decoded + num_prefilled > 0, "work and budget, but no progress"
        elif batch.token_budget and batch.num_waiting:
            assert split.prefill_tokens > 0, "requests wait, there is budget, but none can begin"

    check()


def check_victim(policy: VictimPolicy, profile: settings = CONTRACT) -> None:
    """It names each candidate once, in an order that does not depend on how they were listed."""

    @profile
    @given(victim_lists(), request_views(), load_views(), st.randoms(), memories(policy))
    def check(
        candidates: list[VictimView], claimant: RequestView, load: LoadView, random: Any, state: Any
    ) -> None:
        ask = asking(policy.rank, state)
        ranked = list(ask(tuple(candidates), claimant, load))
        assert sorted(ranked) == sorted(view.request.request_id for view in candidates)
        random.shuffle(candidates)
        assert ranked == list(ask(tuple(candidates), claimant, load)), "the order of asking matters"

    check()


def check_reclaim(policy: ReclaimPolicy, profile: settings = CONTRACT) -> None:
    """It answers with a Reclaim that can be carried out: host room for a swap, a tail that suffices."""

    @profile
    @given(victim_views(), counts, rates, load_views(), memories(policy))
    def check(victim: VictimView, num_blocks_short: int, measured: Rates, load: LoadView, state: Any) -> None:
        ask = asking(policy.choose, state)
        answer = ask(victim, num_blocks_short, measured, load)
        assert isinstance(answer, Reclaim)
        assert answer is ask(victim, num_blocks_short, measured, load), "the same question, another answer"
        if answer is Reclaim.SWAP:
            assert victim.num_blocks <= load.host.num_available, "a swap without host room"
        if answer is Reclaim.TAIL:
            assert 0 < num_blocks_short <= victim.num_tail_blocks, "a tail that does not end the shortage"

    check()


def check_eviction(policy: EvictionPolicy, profile: settings = CONTRACT) -> None:
    """Scores are finite numbers."""

    @profile
    @given(block_views, memories(policy))
    def check(block: BlockView, state: Any) -> None:
        ask = asking(policy.score, state)
        score = ask(block)
        assert isinstance(score, (int, float))
        assert math.isfinite(score)
        assert score == ask(block), "the same question, another answer"

    check()


CHECKS: Mapping[str, Callable[..., None]] = {
    "queue": check_queue,
    "admission": check_admission,
    "batch": check_batch,
    "victim": check_victim,
    "reclaim": check_reclaim,
    "eviction": check_eviction,
}
