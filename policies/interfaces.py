"""The decisions, one small interface each: six of a server's scheduler, and which server takes a request.

A policy is a frozen dataclass whose fields are its options. It ranks, scores or chooses over views;
it never touches a block, keeps nothing to itself, reads no clock. The core carries its decision out and
survives any answer: an unknown id, a wrong type, an exception or an impossible choice is counted and
replaced by the default of that axis.

A policy that needs a memory is `Stateful`: it says how the memory begins and how an event changes it, and
the core keeps it. So the policy stays a pure value, and a recorded decision can be made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

from pageturner.policies.events import PolicyEvent
from pageturner.policies.fleet import Draw, FleetView, RoutedRequest
from pageturner.policies.views import (
    AdmissionView,
    BatchView,
    BlockView,
    LoadView,
    Rates,
    RequestView,
    VictimView,
)

SortKey = tuple[float | int | str, ...]
State = TypeVar("State")


class KeyChange(Enum):
    """When a queue key may change, so that the core can keep its order incrementally."""

    NEVER = "never"
    WITH_REQUEST = "with_request"
    WITH_TIME = "with_time"


class Admission(Enum):
    """ADMIT now; WAIT and hold those behind; SKIP so that those behind may try (bounded)."""

    ADMIT = "admit"
    WAIT = "wait"
    SKIP = "skip"


class Reclaim(Enum):
    """How a victim yields: KV to the host, KV dropped, or only the blocks at its end dropped."""

    SWAP = "swap"
    RECOMPUTE = "recompute"
    TAIL = "tail"


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """Shares of the step's token budget.

    Budget that one kind of work leaves unused falls to the other only if the policy's bounds allow it.
    """

    decode_tokens: int
    """At most so many tokens of decodes."""
    prefill_tokens: int
    """At most so many tokens of prefills."""
    chunk_tokens: int | None = None
    """At most so many tokens of one request's prefill; None: no bound."""


@runtime_checkable
class QueuePolicy(Protocol):
    """In which order do waiting, preempted and swapped requests get their turn?"""

    key_change: ClassVar[KeyChange]

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        """Smallest first. Ties fall to arrival. Keys of one policy must be comparable."""
        ...


@runtime_checkable
class AdmissionPolicy(Protocol):
    """May the request whose turn it is start now?"""

    def decide(self, candidate: AdmissionView, load: LoadView) -> Admission: ...


@runtime_checkable
class BatchPolicy(Protocol):
    """How is the token budget of one step split?"""

    def split(self, batch: BatchView) -> BatchSplit: ...


@runtime_checkable
class VictimPolicy(Protocol):
    """Who yields when blocks or slots run out?"""

    def rank(self, candidates: Sequence[VictimView], claimant: RequestView, load: LoadView) -> Sequence[str]:
        """Request ids, first to yield first. The claimant may be among the candidates."""
        ...


@runtime_checkable
class ReclaimPolicy(Protocol):
    """How does a victim yield?"""

    def choose(self, victim: VictimView, num_blocks_short: int, rates: Rates, load: LoadView) -> Reclaim: ...


@runtime_checkable
class EvictionPolicy(Protocol):
    """Which cached block is overwritten first?"""

    def score(self, block: BlockView) -> float:
        """Smallest is evicted first. Asked when the block is released, and once more, of every cached
        block as it was then, when this policy comes into force. Must be finite."""
        ...


@runtime_checkable
class RoutingPolicy(Protocol):
    """Which replica takes a request, where several servers share the load?"""

    def route(self, request: RoutedRequest, fleet: FleetView, draw: Draw) -> Sequence[str]:
        """Replica ids of the fleet, the best first: one at least. The router sends the request to the first
        that takes it. All chance is `draw`'s, so that a choice can be made again. It keeps no memory: what
        was sent where is the fleet's to know."""
        ...


@runtime_checkable
class Stateful(Protocol[State]):
    """What a policy of any axis adds, if it needs a memory. States are frozen values; `fold` makes a new one.

    Its decision methods take one more argument, keyword-only: `state`, by default that of a policy which
    has seen nothing. So it is a plain policy of its axis too.

        @dataclass(frozen=True, slots=True)
        class FewestStarts:
            key_change: ClassVar[KeyChange] = KeyChange.WITH_TIME

            def initial_state(self) -> Counts: ...
            def fold(self, state: Counts, event: PolicyEvent) -> Counts: ...
            def key(self, request: RequestView, load: LoadView, *, state: Counts = EMPTY) -> SortKey: ...

    The core
      - keeps one state for each axis whose policy `is_stateful`, `initial_state()` at first;
      - folds every event of `policies.events` into it, in order, before the next decision is asked for;
      - passes `state=` the newest state with every question to this policy;
      - if `fold` raises, counts a fault of the axis and keeps the state of before;
      - records the state with a decision, if that decision is to be replayed.

    On a live swap the state stays if old and new policy are equal. Else, if the old policy was stateful
    and the new one `Migrating`, it is what `migrate` makes of it. Else, or if `migrate` gives None or
    raises, the memory begins anew: `initial_state()`, told of every live request in order of acceptance:
    RequestQueued for each, and RequestStarted for those that run, with `is_first` only for those that
    never ran, `num_cached_tokens` 0, and the moment of the swap for `now`.

    A queue policy whose key depends on its state declares `KeyChange.WITH_TIME`: its keys are asked for
    again when the core re-sorts, and may be as old as that interval.
    """

    def initial_state(self) -> State: ...

    def fold(self, state: State, event: PolicyEvent) -> State:
        """The state after `event`, of the same class as before. Must accept events in any order, and of
        requests that it was never told of."""
        ...


@runtime_checkable
class Migrating(Stateful[State], Protocol[State]):
    """A stateful policy that can take over the memory of the one before it on its axis."""

    def migrate(self, predecessor: object) -> State | None:
        """Its own state made from the predecessor's, whole; None if that is of no use to it."""
        ...


def is_stateful(policy: object) -> bool:
    """Whether the core keeps a state for this policy."""
    return isinstance(policy, Stateful)


@dataclass(frozen=True, slots=True)
class PolicySet:
    """One policy for each axis."""

    queue: QueuePolicy
    admission: AdmissionPolicy
    batch: BatchPolicy
    victim: VictimPolicy
    reclaim: ReclaimPolicy
    eviction: EvictionPolicy


AXES: tuple[str, ...] = ("queue", "admission", "batch", "victim", "reclaim", "eviction")
"""Of a server's scheduler: one policy for each is a `PolicySet`."""

FLEET_AXES: tuple[str, ...] = ("routing",)
"""Of who sends requests to servers; no single server uses them."""

ALL_AXES: tuple[str, ...] = AXES + FLEET_AXES
