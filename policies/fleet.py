"""What a routing policy sees: one request, and the replicas that may take it.

A replica is one server with a KV cache of its own, behind a router with others that serve the same model. A
fleet answers questions about all of them, so that a choice among a thousand need not look at each.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, TypeAlias

Digest: TypeAlias = bytes | int
"""Names all tokens of a prompt up to some point, as a block's hash in the prefix cache does."""

Draw: TypeAlias = Callable[[int], int]
"""draw(n): a whole number of range(n), each as likely; n is at least 1."""

_MIX = 0xFF51AFD7ED558CCD
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request that is to be sent to some replica."""

    number: int
    """How many requests this router has sent on before it, counted from a number that is drawn once, so that
    many routers do not march in step."""
    num_prompt_tokens: int
    digests: tuple[Digest, ...] = ()
    """The chain of its prompt: one for every `tokens_per_digest` tokens, each naming all before it too."""
    tokens_per_digest: int = 16
    session: str = ""
    """The conversation that it belongs to; empty if none."""
    priority: int = 0
    """Larger is more urgent."""
    tenant: str = ""

    def cached_tokens(self, num_digests: int) -> int:
        """Tokens of the prompt that a replica need not compute if it holds so many of the digests."""
        return min(self.num_prompt_tokens, num_digests * self.tokens_per_digest)


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica as its router believes it to be: the last report, and what was sent and ended since."""

    replica_id: str
    num_queued_tokens: int = 0
    """Tokens of prompts that it has yet to compute."""
    num_requests: int = 0
    """Requests there, running or waiting."""
    capacity: float = 1.0
    """Its speed, beside that of the others: 2.0 does twice the work of 1.0 in the same time."""
    load: float = 0.0
    """The work that waits there: queued tokens, and for each request what its answer costs in such tokens,
    over capacity. In tokens, so that it can be weighed against a prompt."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Who holds most of a prompt. num_digests: how many of them from the first on; replica_ids: of all
    replicas that hold so many, in no order that says anything; none where num_digests is 0."""

    num_digests: int
    replica_ids: Sequence[str] = ()


NO_MATCH = PrefixMatch(0)


class FleetView(Protocol):
    """The replicas that may take a request now, one at least; those that drain or failed are not among them.

    Good for the length of one question: it may be what the router keeps, and not a copy.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> ReplicaView:
        """In the order in which they joined, from 0 on."""
        ...

    def __iter__(self) -> Iterator[ReplicaView]: ...

    def __contains__(self, replica_id: object) -> bool:
        """Whether a replica of that id is among them."""
        ...

    def find(self, replica_id: str) -> ReplicaView:
        """The replica of that id. Raises KeyError."""
        ...

    def least_loaded(self) -> ReplicaView:
        """Of equals the first."""
        ...

    def mean_load(self) -> float:
        """Over all replicas."""
        ...

    def longest_match(self, digests: Sequence[Digest]) -> PrefixMatch:
        """Who is believed to hold most of these from the first on."""
        ...

    def num_held(self, replica_id: str, digests: Sequence[Digest]) -> int:
        """How many of these, from the first on, that replica is believed to hold."""
        ...

    def by_affinity(self, key: str, count: int) -> Sequence[str]:
        """The first `count` replica ids (fewer if there are fewer) in an order that the key alone chooses.

        Rendezvous hashing, weighted by capacity: the first of all gets its share of all keys; when replicas
        join or leave only those keys move whose first replica that is. The same in every process.
        """
        ...


class Affinity:
    """Rendezvous hashing (Thaler and Ravishankar, 1998) over some replicas, weighted by capacity as in
    Schindelhauer and Schomaker (2005): of -capacity / log(hash of key and replica) the largest come first."""

    __slots__ = ("_capacities", "_ids", "_seeds")

    def __init__(self, replicas: Iterable[tuple[str, float]]) -> None:
        """replicas: ids and capacities."""
        listed = tuple(replicas)
        self._ids = tuple(replica_id for replica_id, _ in listed)
        self._seeds = tuple(_hash(replica_id) for replica_id, _ in listed)
        self._capacities = tuple(capacity for _, capacity in listed)

    def first(self, key: str, count: int) -> tuple[str, ...]:
        """`FleetView.by_affinity`."""
        hashed, log = _hash(key), math.log
        scores = []
        for seed, capacity in zip(self._seeds, self._capacities, strict=True):
            mixed = (hashed ^ seed) * _MIX & _MASK
            mixed = (mixed ^ mixed >> 32) * _MIX & _MASK
            scores.append(log(((mixed >> 11) + 0.5) * 2.0**-53) / capacity)
        best = heapq.nlargest(count, range(len(scores)), key=scores.__getitem__)
        return tuple(self._ids[index] for index in best)


@dataclass(frozen=True, slots=True)
class ListedFleet:
    """A fleet written down: it looks at every replica for each answer. For tests, and for fleets of a few.

    held: by replica id, the digests that it holds.
    """

    replicas: tuple[ReplicaView, ...]
    held: Mapping[str, frozenset[Digest]] = field(default_factory=lambda: MappingProxyType({}))

    def __len__(self) -> int:
        return len(self.replicas)

    def __getitem__(self, index: int) -> ReplicaView:
        return self.replicas[index]

    def __iter__(self) -> Iterator[ReplicaView]:
        return iter(self.replicas)

    def __contains__(self, replica_id: object) -> bool:
        return any(replica.replica_id == replica_id for replica in self.replicas)

    def find(self, replica_id: str) -> ReplicaView:
        for replica in self.replicas:
            if replica.replica_id == replica_id:
                return replica
        raise KeyError(replica_id)

    def least_loaded(self) -> ReplicaView:
        return min(self.replicas, key=lambda replica: replica.load)

    def mean_load(self) -> float:
        return math.fsum(replica.load for replica in self.replicas) / len(self.replicas)

    def longest_match(self, digests: Sequence[Digest]) -> PrefixMatch:
        depths = {replica.replica_id: self.num_held(replica.replica_id, digests) for replica in self.replicas}
        deepest = max(depths.values())
        if not deepest:
            return NO_MATCH
        return PrefixMatch(deepest, tuple(name for name, depth in depths.items() if depth == deepest))

    def num_held(self, replica_id: str, digests: Sequence[Digest]) -> int:
        held = self.held.get(replica_id, frozenset())
        depth = 0
        for digest in digests:
            if digest not in held:
                break
            depth += 1
        return depth

    def by_affinity(self, key: str, count: int) -> Sequence[str]:
        return Affinity((replica.replica_id, replica.capacity) for replica in self.replicas).first(key, count)


def _hash(text: str) -> int:
    """64 bits that only the text decides."""
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
    )
