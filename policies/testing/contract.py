"""The contract of each axis, clause by clause, tried on a few hundred drawn questions.

A policy must never raise, give the same answer to the same question, answer in the shape of its axis, be a
frozen and hashable value, and come back from its name and options. One with a memory is told any events in
any order, and must keep all that whatever it remembers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from pageturner.policies import registry
from pageturner.policies.interfaces import (
    Admission,
    BatchSplit,
    KeyChange,
    Reclaim,
    is_stateful,
)
from pageturner.policies.testing import samples
from pageturner.policies.views import BatchView, LoadView, RequestView, VictimView

NUM_CASES = 300
_SHOWN = 600

Ask = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One trial. ask: the method of the policy's axis, with some memory if it has one; rng: what to ask."""

    policy: Any
    ask: Ask
    rng: Random


class ContractBroken(AssertionError):
    """A policy does what its axis does not allow; says what, and by which question it showed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One clause of the contract. fault: how it was broken, and by which question; empty if it holds."""

    clause: str
    fault: str

    @property
    def holds(self) -> bool:
        """Whether no clause is broken."""
        return not self.fault


def check_policy(axis: str, policy: Any, seed: int = 0) -> None:
    """Raise ContractBroken at the first clause that does not hold."""
    for verdict in _verdicts(axis, policy, seed):
        if not verdict.holds:
            raise ContractBroken(f"{verdict.clause}: {verdict.fault}")


def try_policy(axis: str, policy: Any, seed: int = 0) -> tuple[Verdict, ...]:
    """Every clause, whether it holds or not."""
    return tuple(_verdicts(axis, policy, seed))


def _verdicts(axis: str, policy: Any, seed: int) -> Iterator[Verdict]:
    yield _verdict("a frozen dataclass, hashable, equal to its copy", lambda: _check_value(policy))
    yield _verdict("its name and options make it again", lambda: _check_options(axis, policy))
    if is_stateful(policy):
        yield _verdict(
            "its memory takes any events, and is a frozen value", lambda: _check_memory(policy, seed)
        )
    for clause, check in _CLAUSES[axis].items():
        yield _verdict(clause, functools.partial(_try_all, policy, _METHODS[axis], check, seed))


def _verdict(clause: str, check: Callable[[], None]) -> Verdict:
    try:
        check()
    except ContractBroken as broken:
        return Verdict(clause, str(broken))
    except Exception as error:  # a policy may raise any exception
        return Verdict(clause, f"raised {type(error).__name__}: {error}"[:_SHOWN])
    return Verdict(clause, "")


def _require(condition: object, fault: str, *shown: object) -> None:
    if not condition:
        asked = "; ".join(repr(each)[:_SHOWN] for each in shown)
        raise ContractBroken(f"{fault}, asked {asked}" if shown else fault)


# --- what every policy is --------------------------------------------------------------------


def _check_value(policy: Any) -> None:
    parameters = getattr(type(policy), "__dataclass_params__", None)
    _require(parameters is not None, "it is no dataclass")
    _require(parameters is not None and parameters.frozen, "it is not frozen: @dataclass(frozen=True)")
    copy = replace(policy)
    _require(copy == policy, "it differs from its copy")
    _require(hash(copy) == hash(policy), "its hash differs from its copy's")


def _check_options(axis: str, policy: Any) -> None:
    made = registry.create(axis, registry.name_of(policy), registry.options_of(policy))
    _require(made == policy, f"{registry.spec_of(policy)} makes {made!r}")


def _check_memory(policy: Any, seed: int) -> None:
    rng = Random(seed)
    _require(policy.initial_state() == policy.initial_state(), "its initial states differ")
    for _ in range(NUM_CASES):
        events, states = samples.events(rng), [policy.initial_state()]
        for event in events:
            before = repr(states[-1])
            states.append(policy.fold(states[-1], event))
            _require(repr(states[-2]) == before, "a fold changed the state that it was given", event)
            _require(policy.fold(states[-2], event) == states[-1], "the same event made another state", event)
            _require(type(states[-1]) is type(states[0]), "a fold made a state of another class", event)
        parameters = getattr(type(states[-1]), "__dataclass_params__", None)
        _require(parameters is not None and parameters.frozen, "a state is no frozen dataclass")


# --- what each axis asks ----------------------------------------------------------------------


def _try_all(policy: Any, method: str, check: Callable[[Case], None], seed: int) -> None:
    rng = Random(seed)
    for _ in range(NUM_CASES):
        ask = getattr(policy, method)
        if is_stateful(policy):
            state = functools.reduce(policy.fold, samples.events(rng), policy.initial_state())
            ask = functools.partial(ask, state=state)
        check(Case(policy, ask, rng))


def _same(ask: Ask, *asked: object) -> Any:
    """The answer, which must be the same when asked again."""
    answer = ask(*asked)
    again = ask(*asked)
    _require(again == answer, f"answered {answer!r}, then {again!r}", *asked)
    return answer


def _keys(ask: Ask, requests: list[RequestView], load: LoadView) -> list[Any]:
    return [ask(request, load) for request in requests]


def _requests(rng: Random) -> list[RequestView]:
    return [samples.request_view(rng) for _ in range(rng.randint(2, 4))]


def _check_keys(case: Case) -> None:
    ask, rng = case.ask, case.rng
    request, load = samples.request_view(rng), samples.load_view(rng)
    key = _same(ask, request, load)
    _require(isinstance(key, tuple), f"the key {key!r} is no tuple", request, load)
    for part in key:
        is_finite = isinstance(part, (str, int)) or (isinstance(part, float) and math.isfinite(part))
        _require(is_finite, f"the key {key!r} has a part that is no text and no finite number", request)


def _check_comparable(case: Case) -> None:
    ask, rng = case.ask, case.rng
    keys = _keys(ask, _requests(rng), samples.load_view(rng))
    try:
        sorted(keys)
    except TypeError as error:
        raise ContractBroken(f"keys that do not compare: {keys!r} ({error})"[:_SHOWN]) from error


def _check_changes(case: Case) -> None:
    policy, ask, rng = case.policy, case.ask, case.rng
    change = policy.key_change
    _require(isinstance(change, KeyChange), "key_change is no KeyChange")
    if change is KeyChange.WITH_TIME:
        return
    _require(not is_stateful(policy), "a key that follows a memory changes with time: KeyChange.WITH_TIME")
    requests, load, later = _requests(rng), samples.load_view(rng), samples.load_view(rng)
    keys = _keys(ask, requests, load)
    _require(keys == _keys(ask, requests, later), f"{change}, but the key depends on the load", requests[0])
    if change is KeyChange.NEVER:
        moved = [_progressed(request) for request in requests]
        _require(keys == _keys(ask, moved, later), f"{change}, but the key depends on progress", requests[0])


def _progressed(request: RequestView) -> RequestView:
    return replace(
        request,
        num_tokens=request.num_tokens + 1,
        num_output_tokens=request.num_output_tokens + 1,
        num_uncomputed_tokens=0,
        num_cached_tokens=0,
        num_preemptions=request.num_preemptions + 1,
        num_bypasses=request.num_bypasses + 1,
    )


def _check_admission(case: Case) -> None:
    ask, rng = case.ask, case.rng
    asked = samples.admission_view(rng), samples.load_view(rng)
    answer = _same(ask, *asked)
    _require(isinstance(answer, Admission), f"answered {answer!r}", *asked)


def _check_split(case: Case) -> None:
    ask, rng = case.ask, case.rng
    batch = samples.batch_view(rng)
    split = _same(ask, batch)
    _require(isinstance(split, BatchSplit), f"answered {split!r}", batch)
    shares = (split.decode_tokens, split.prefill_tokens)
    _require(all(type(share) is int and share >= 0 for share in shares), f"shares are {shares}", batch)
    _require(sum(shares) <= batch.token_budget, f"{shares} are more than the budget", batch)
    chunk = split.chunk_tokens
    _require(chunk is None or (type(chunk) is int and chunk >= 1), f"chunk_tokens is {chunk!r}", batch)


def _check_progress(case: Case) -> None:
    ask, rng = case.ask, case.rng
    batch: BatchView = samples.batch_view(rng)
    split = ask(batch)
    done = min(split.decode_tokens, batch.num_decode_tokens) + min(
        split.prefill_tokens, sum(batch.prefill_tokens)
    )
    if batch.token_budget and (batch.num_decode_tokens or batch.prefill_tokens):
        _require(done > 0, f"{split} does none of the work that there is", batch)
    elif batch.token_budget and batch.num_waiting:
        _require(split.prefill_tokens > 0, f"{split} lets none of the waiting requests begin", batch)


def _check_order(case: Case) -> None:
    ask, rng = case.ask, case.rng
    candidates, claimant, load = samples.victim_views(rng), samples.request_view(rng), samples.load_view(rng)
    ranked = list(ask(candidates, claimant, load))
    ids = sorted(view.request.request_id for view in candidates)
    _require(sorted(ranked) == ids, f"ranked {ranked}, of the candidates {ids}", claimant)
    _require(list(ask(candidates, claimant, load)) == ranked, "ranked otherwise when asked again", candidates)


def _check_listing(case: Case) -> None:
    ask, rng = case.ask, case.rng
    candidates: tuple[VictimView, ...] = samples.victim_views(rng)
    claimant, load = samples.request_view(rng), samples.load_view(rng)
    shuffled = tuple(rng.sample(candidates, len(candidates)))
    orders = [list(ask(listed, claimant, load)) for listed in (candidates, shuffled)]
    _require(orders[0] == orders[1], f"ranked {orders[0]}, and {orders[1]} where they were listed otherwise")


def _check_reclaim(case: Case) -> None:
    ask, rng = case.ask, case.rng
    victim, short, load = samples.victim_view(rng), samples.count(rng), samples.load_view(rng)
    asked = (victim, short, samples.rates(rng), load)
    answer = _same(ask, *asked)
    _require(isinstance(answer, Reclaim), f"answered {answer!r}", *asked)
    if answer is Reclaim.SWAP:
        _require(victim.num_blocks <= load.host.num_available, "a swap that the host has no room for", *asked)
    if answer is Reclaim.TAIL:
        _require(0 < short <= victim.num_tail_blocks, "a tail that does not end the shortage", *asked)


def _check_score(case: Case) -> None:
    ask, rng = case.ask, case.rng
    block = samples.block_view(rng)
    score = _same(ask, block)
    _require(isinstance(score, (int, float)) and math.isfinite(score), f"the score is {score!r}", block)


def _check_replicas(case: Case) -> None:
    ask, rng = case.ask, case.rng
    request, fleet, seed = samples.routed_request(rng), samples.fleet_view(rng), rng.random()
    named, again = (list(ask(request, fleet, Random(seed).randrange)) for _ in range(2))
    _require(named == again, f"answered {named}, then {again} with equal draws", request, fleet)
    known = {replica.replica_id for replica in fleet.replicas}
    _require(named, "it names no replica", request, fleet)
    _require(known.issuperset(named), f"named {named}, of the replicas {sorted(known)}", request)
    _require(len(set(named)) == len(named), f"named a replica twice: {named}", request)


def _check_no_routing_memory(case: Case) -> None:
    _require(not is_stateful(case.policy), "it has a memory, which no router keeps")


_METHODS: Mapping[str, str] = {
    "queue": "key",
    "admission": "decide",
    "batch": "split",
    "victim": "rank",
    "reclaim": "choose",
    "eviction": "score",
    "routing": "route",
}
_CLAUSES: Mapping[str, Mapping[str, Callable[[Case], None]]] = {
    "queue": {
        "keys are tuples of texts and finite numbers": _check_keys,
        "any two keys compare": _check_comparable,
        "keys change only as key_change says": _check_changes,
    },
    "admission": {"it answers with an Admission": _check_admission},
    "batch": {
        "shares are whole, not negative, within the budget": _check_split,
        "some of the work that there is gets done": _check_progress,
    },
    "victim": {
        "each candidate is named once": _check_order,
        "the order does not depend on how they are listed": _check_listing,
    },
    "reclaim": {"it answers with a Reclaim that can be carried out": _check_reclaim},
    "eviction": {"scores are finite numbers": _check_score},
    "routing": {
        "replicas of the fleet are named, each once, by equal draws the same": _check_replicas,
        "it keeps no memory": _check_no_routing_memory,
    },
}
