"""The six decisions, one small interface each.

A policy is a frozen dataclass whose fields are its options. It ranks, scores or chooses over views;
it never touches a block, keeps no state, reads no clock. The core carries its decision out and
survives any answer: an unknown id, a wrong type, an exception or an impossible choice is counted and
replaced by the default of that axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol, runtime_checkable

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

    decode_tokens and prefill_tokens bound the two kinds of work; chunk_tokens, if given, bounds the
    tokens one request may prefill in this step. Budget that one kind leaves unused falls to the other
    only if the policy's bounds allow it.
    """

    decode_tokens: int
    prefill_tokens: int
    chunk_tokens: int | None = None


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
        """Smallest is evicted first. Asked once, when the block is released. Must be finite."""
        ...


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
