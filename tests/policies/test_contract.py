"""Every registered policy keeps the contract of its axis, and the contract catches those that do not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from pageturner.policies import registry
from pageturner.policies.admission import FirstChunk, FullPrompt, GuaranteedNoEvict, PeakEstimate, Watermark
from pageturner.policies.batch import EqualProgress, LongPrefillCap
from pageturner.policies.events import PolicyEvent, RequestEnded
from pageturner.policies.eviction import CostAware, Lfu, PriorityWithTtl, SegmentedLru
from pageturner.policies.fleet import Draw, FleetView, RoutedRequest
from pageturner.policies.interfaces import (
    ALL_AXES,
    Admission,
    AdmissionPolicy,
    BatchPolicy,
    BatchSplit,
    EvictionPolicy,
    KeyChange,
    QueuePolicy,
    Reclaim,
    ReclaimPolicy,
    RoutingPolicy,
    SortKey,
    VictimPolicy,
)
from pageturner.policies.queue import (
    EarliestDeadlineFirst,
    HighestResponseRatioNext,
    LongestPrefixMatch,
    MultiLevelFeedback,
    PriorityWithAging,
    ShortestJobFirst,
    VirtualTokenCounter,
)
from pageturner.policies.reclaim import CostModel, HostHeadroom, TailFirst
from pageturner.policies.routing import PowerOfTwo, PrefixAware, SessionAffinity
from pageturner.policies.testing import ContractBroken, check_policy, try_policy
from pageturner.policies.victim import MostOverServed
from pageturner.policies.views import (
    AdmissionView,
    BatchView,
    BlockView,
    LoadView,
    Rates,
    RequestView,
    VictimView,
)

OTHER_OPTIONS: list[tuple[str, Any]] = [
    ("queue", PriorityWithAging(aging_seconds=0.001)),
    ("queue", ShortestJobFirst(prefill_weight=0)),
    ("queue", LongestPrefixMatch(cap_tokens=0, aging_tokens_per_second=1e-3)),
    ("queue", HighestResponseRatioNext(seconds_per_output_token=1e-6, seconds_per_prompt_token=0)),
    ("queue", EarliestDeadlineFirst(default_seconds=0)),
    ("queue", MultiLevelFeedback(quantum_tokens=1, num_levels=64, prompt_weight=0, boost_seconds=1e-3)),
    ("queue", VirtualTokenCounter(input_weight=0, output_weight=0, tenant_weights="a=1e-3, b=1e6")),
    ("admission", FirstChunk(skip=True)),
    ("admission", Watermark(fraction=1)),
    ("admission", FullPrompt(skip=True)),
    ("admission", GuaranteedNoEvict(skip=True)),
    ("admission", PeakEstimate(output_fraction=0.0)),
    ("batch", EqualProgress(min_chunk_tokens=1)),
    ("batch", LongPrefillCap(cap_tokens=1)),
    ("victim", MostOverServed(input_weight=0, tenant_weights="=7")),
    ("reclaim", CostModel(swap_weight=0)),
    ("reclaim", HostHeadroom(headroom=0)),
    ("reclaim", HostHeadroom(headroom=1)),
    ("reclaim", TailFirst(swap_rest=True)),
    ("eviction", Lfu(seconds_per_hit=0)),
    ("eviction", SegmentedLru(protect_after_hits=3, protected_seconds=0)),
    ("eviction", PriorityWithTtl(ttl_seconds=0, max_level=1)),
    ("eviction", CostAware(seconds_per_block=1e3, context_weight=1.0)),
    ("routing", PrefixAware(max_imbalance=1, saved_weight=0, min_match=0, choices=1)),
    (
        "routing",
        PrefixAware(max_imbalance=1e9, saved_weight=1e9, min_match=1, choices=99, fallback_choices=2),
    ),
    ("routing", PowerOfTwo(choices=1)),
    ("routing", PowerOfTwo(choices=99)),
    ("routing", SessionAffinity(max_imbalance=1, slack_tokens=0, order=1)),
    ("routing", SessionAffinity(order=99)),
]


@pytest.mark.parametrize(
    ("axis", "name"), [(axis, name) for axis in ALL_AXES for name in registry.names(axis)]
)
def test_every_registered_policy_keeps_the_contract(axis: str, name: str) -> None:
    check_policy(axis, registry.create(axis, name))


@pytest.mark.parametrize(("axis", "policy"), OTHER_OPTIONS)
def test_the_contract_holds_at_the_edges_of_the_options(axis: str, policy: Any) -> None:
    check_policy(axis, policy)


# One policy a line of the contract, each broken in just that.

MADE_AGAIN = "its name and options make it again"
NAMED = "replicas of the fleet are named, each once, by equal draws the same"
MEMORY = "its memory takes any events, and is a frozen value"


def broken_clauses(axis: str, policy: Any) -> list[str]:
    """Those that do not hold, save for the one that needs a policy at the top of its module."""
    return [v.clause for v in try_policy(axis, policy) if not v.holds and v.clause != MADE_AGAIN]


@dataclass(frozen=True)
class Moody:
    """Answers by a counter that it hides in a field: every second answer differs."""

    key_change: ClassVar[KeyChange] = KeyChange.WITH_TIME
    counter: Any = field(default_factory=itertools.count, compare=False)

    def _odd(self) -> bool:
        return bool(next(self.counter) % 2)

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        return (self._odd(),)

    def decide(self, candidate: AdmissionView, load: LoadView) -> Admission:
        return Admission.ADMIT if self._odd() else Admission.WAIT

    def split(self, batch: BatchView) -> BatchSplit:
        return BatchSplit(batch.token_budget, 0) if self._odd() else BatchSplit(0, batch.token_budget)

    def rank(self, candidates: Sequence[VictimView], claimant: RequestView, load: LoadView) -> Sequence[str]:
        return sorted((view.request.request_id for view in candidates), reverse=self._odd())

    def choose(self, victim: VictimView, num_blocks_short: int, rates: Rates, load: LoadView) -> Reclaim:
        return Reclaim.RECOMPUTE if self._odd() else Reclaim.SWAP

    def score(self, block: BlockView) -> float:
        return float(self._odd())

    def route(self, request: RoutedRequest, fleet: FleetView, draw: Draw) -> Sequence[str]:
        return (fleet[0].replica_id,) if self._odd() else (fleet[len(fleet) - 1].replica_id,)


@pytest.mark.parametrize("axis", ALL_AXES)
def test_a_policy_of_changing_answers_is_caught_on_every_axis(axis: str) -> None:
    assert broken_clauses(axis, Moody())


@dataclass(frozen=True)
class Throwing:
    """Divides by something that the core may show as zero."""

    key_change: ClassVar[KeyChange] = KeyChange.WITH_TIME

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        return (1 / request.num_uncomputed_tokens,)

    def decide(self, candidate: AdmissionView, load: LoadView) -> Admission:
        return Admission.ADMIT if 1 / candidate.num_blocks_known else Admission.WAIT

    def split(self, batch: BatchView) -> BatchSplit:
        return BatchSplit(batch.token_budget // batch.num_decode_tokens, 0)

    def rank(self, candidates: Sequence[VictimView], claimant: RequestView, load: LoadView) -> Sequence[str]:
        return [max(candidates, key=lambda view: view.num_blocks).request.request_id]

    def choose(self, victim: VictimView, num_blocks_short: int, rates: Rates, load: LoadView) -> Reclaim:
        return Reclaim.RECOMPUTE if 1 / victim.num_tail_blocks else Reclaim.TAIL

    def score(self, block: BlockView) -> float:
        return 1 / block.depth

    def route(self, request: RoutedRequest, fleet: FleetView, draw: Draw) -> Sequence[str]:
        return (fleet[request.num_prompt_tokens // len(request.digests) % len(fleet)].replica_id,)


@pytest.mark.parametrize("axis", ALL_AXES)
def test_a_policy_that_raises_is_caught_on_every_axis(axis: str) -> None:
    assert broken_clauses(axis, Throwing())


@dataclass(frozen=True)
class IncomparableKeys(QueuePolicy):
    key_change: ClassVar[KeyChange] = KeyChange.WITH_REQUEST

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        return (request.tenant or 0,)


@dataclass(frozen=True)
class NanKeys(QueuePolicy):
    key_change: ClassVar[KeyChange] = KeyChange.WITH_REQUEST

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        return (float("inf") if request.deadline is None else request.deadline,)


@dataclass(frozen=True)
class SaysNeverButAges(QueuePolicy):
    key_change: ClassVar[KeyChange] = KeyChange.NEVER

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        return (request.arrival_time - load.now,)


@dataclass(frozen=True)
class SaysNeverButFollowsProgress(QueuePolicy):
    key_change: ClassVar[KeyChange] = KeyChange.NEVER

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        return (request.num_output_tokens,)


@dataclass(frozen=True)
class AdmitsByBool(AdmissionPolicy):
    def decide(self, candidate: AdmissionView, load: LoadView) -> Admission:
        return True  # type: ignore[return-value]  # the fault under test


@dataclass(frozen=True)
class OverBudget(BatchPolicy):
    def split(self, batch: BatchView) -> BatchSplit:
        return BatchSplit(batch.num_decode_tokens, batch.token_budget)


@dataclass(frozen=True)
class StallsDecodes(BatchPolicy):
    def split(self, batch: BatchView) -> BatchSplit:
        return BatchSplit(0, batch.token_budget)


@dataclass(frozen=True)
class FractionalShares(BatchPolicy):
    def split(self, batch: BatchView) -> BatchSplit:
        return BatchSplit(batch.token_budget / 2, batch.token_budget / 2)  # type: ignore[arg-type]  # the fault


@dataclass(frozen=True)
class SparesOne(VictimPolicy):
    def rank(self, candidates: Sequence[VictimView], claimant: RequestView, load: LoadView) -> Sequence[str]:
        return sorted(view.request.request_id for view in candidates)[1:]


@dataclass(frozen=True)
class RanksAsListed(VictimPolicy):
    def rank(self, candidates: Sequence[VictimView], claimant: RequestView, load: LoadView) -> Sequence[str]:
        return [view.request.request_id for view in candidates]


@dataclass(frozen=True)
class SwapsWithoutRoom(ReclaimPolicy):
    def choose(self, victim: VictimView, num_blocks_short: int, rates: Rates, load: LoadView) -> Reclaim:
        return Reclaim.SWAP


@dataclass(frozen=True)
class TailWithoutEffect(ReclaimPolicy):
    def choose(self, victim: VictimView, num_blocks_short: int, rates: Rates, load: LoadView) -> Reclaim:
        return Reclaim.TAIL


@dataclass(frozen=True)
class InfiniteScore(EvictionPolicy):
    def score(self, block: BlockView) -> float:
        return float("inf") if block.num_hits else 0.0


@dataclass(frozen=True)
class NamesNobody(RoutingPolicy):
    def route(self, request: RoutedRequest, fleet: FleetView, draw: Draw) -> Sequence[str]:
        return fleet.longest_match(request.digests).replica_ids


@dataclass(frozen=True)
class NamesStrangers(RoutingPolicy):
    def route(self, request: RoutedRequest, fleet: FleetView, draw: Draw) -> Sequence[str]:
        return (request.session or fleet[0].replica_id,)


@dataclass(frozen=True)
class NamesOneTwice(RoutingPolicy):
    def route(self, request: RoutedRequest, fleet: FleetView, draw: Draw) -> Sequence[str]:
        return (fleet.least_loaded().replica_id, fleet[draw(len(fleet))].replica_id)


@dataclass(frozen=True)
class DrawsFromNothing(RoutingPolicy):
    def route(self, request: RoutedRequest, fleet: FleetView, draw: Draw) -> Sequence[str]:
        return (fleet[draw(len(request.digests)) % len(fleet)].replica_id,)


@dataclass(frozen=True)
class RemembersRoutes(RoutingPolicy):
    def initial_state(self) -> Tally:
        return Tally()

    def fold(self, state: Tally, event: PolicyEvent) -> Tally:
        return Tally([*state.numbers, len(state.numbers)])

    def route(
        self, request: RoutedRequest, fleet: FleetView, draw: Draw, *, state: Tally | None = None
    ) -> Sequence[str]:
        return (fleet[0].replica_id,)


@pytest.mark.parametrize(
    ("axis", "broken", "clause"),
    [
        ("queue", IncomparableKeys(), "any two keys compare"),
        ("queue", NanKeys(), "keys are tuples of texts and finite numbers"),
        ("queue", SaysNeverButAges(), "keys change only as key_change says"),
        ("queue", SaysNeverButFollowsProgress(), "keys change only as key_change says"),
        ("admission", AdmitsByBool(), "it answers with an Admission"),
        ("batch", OverBudget(), "shares are whole, not negative, within the budget"),
        ("batch", StallsDecodes(), "some of the work that there is gets done"),
        ("batch", FractionalShares(), "shares are whole, not negative, within the budget"),
        ("victim", SparesOne(), "each candidate is named once"),
        ("victim", RanksAsListed(), "the order does not depend on how they are listed"),
        ("reclaim", SwapsWithoutRoom(), "it answers with a Reclaim that can be carried out"),
        ("reclaim", TailWithoutEffect(), "it answers with a Reclaim that can be carried out"),
        ("eviction", InfiniteScore(), "scores are finite numbers"),
        ("routing", NamesNobody(), NAMED),
        ("routing", NamesStrangers(), NAMED),
        ("routing", NamesOneTwice(), NAMED),
        ("routing", DrawsFromNothing(), NAMED),
        ("routing", RemembersRoutes(), "it keeps no memory"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, (str, type)) else "",
)
def test_a_broken_policy_is_caught_by_its_clause(axis: str, broken: Any, clause: str) -> None:
    assert broken_clauses(axis, broken)


def test_a_policy_that_can_be_changed_is_caught() -> None:
    @dataclass
    class Mutable:
        patience: int = 1

    with pytest.raises(ContractBroken, match="not frozen"):
        check_policy("victim", Mutable())


def test_a_policy_that_cannot_be_hashed_is_caught() -> None:
    @dataclass(frozen=True)
    class Unhashable:
        weights: list[int] = field(default_factory=list)

    with pytest.raises(ContractBroken, match="unhashable"):
        check_policy("victim", Unhashable())


# The same for the memory.


@dataclass(frozen=True)
class Tally:
    """How many events were told, in a list that can be changed."""

    numbers: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Remembers(EvictionPolicy):
    """Scores by the number of events told; `fold` is what the subclasses break."""

    def initial_state(self) -> Tally:
        return Tally()

    def fold(self, state: Tally, event: PolicyEvent) -> Tally:
        return Tally([*state.numbers, len(state.numbers)])

    def score(self, block: BlockView, *, state: Tally | None = None) -> float:
        return float(len(state.numbers) if state is not None else 0)


class ChangesItsState(Remembers):
    def fold(self, state: Tally, event: PolicyEvent) -> Tally:
        state.numbers.append(1)
        return state


class MindsUnknownIds(Remembers):
    def fold(self, state: Tally, event: PolicyEvent) -> Tally:
        if isinstance(event, RequestEnded):
            state.numbers[-1]
        return super().fold(state, event)


class FoldsByChance(Remembers):
    counter: ClassVar[Any] = itertools.count()

    def fold(self, state: Tally, event: PolicyEvent) -> Tally:
        return Tally([next(self.counter)])


class HasAnOpenState(Remembers):
    def initial_state(self) -> Any:
        return [0]

    def fold(self, state: Any, event: PolicyEvent) -> Any:
        return [1]


class ScoresByItsMemoryAlone(Remembers):
    def score(self, block: BlockView, *, state: Tally | None = None) -> float:
        return 1 / (3 - len(state.numbers if state is not None else ()))


def test_a_policy_that_remembers_well_passes() -> None:
    assert broken_clauses("eviction", Remembers()) == []


@pytest.mark.parametrize(
    "broken", [ChangesItsState(), MindsUnknownIds(), FoldsByChance(), HasAnOpenState()], ids=repr
)
def test_a_broken_memory_is_caught(broken: Any) -> None:
    assert MEMORY in broken_clauses("eviction", broken)


def test_decisions_are_asked_for_in_many_states() -> None:
    assert broken_clauses("eviction", ScoresByItsMemoryAlone()) == ["scores are finite numbers"]


def test_a_key_that_follows_a_memory_must_say_that_it_changes() -> None:
    @dataclass(frozen=True)
    class SaysNever(Remembers):
        key_change: ClassVar[KeyChange] = KeyChange.NEVER

        def key(self, request: RequestView, load: LoadView, *, state: Tally | None = None) -> SortKey:
            return (0,)

    faults = [verdict.fault for verdict in try_policy("queue", SaysNever())]
    assert any("follows a memory" in fault for fault in faults)
