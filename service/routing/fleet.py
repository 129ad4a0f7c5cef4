"""The replicas that may take a request, indexed: what a policy asks takes no look at each of a thousand.

Each change costs the logarithm of their number. `policies.fleet.ListedFleet` gives the same answers by
looking at all; the tests hold the two together.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from pageturner.policies.fleet import Affinity, Digest, PrefixMatch, ReplicaView
from pageturner.service.routing.load import ReplicaLoad
from pageturner.service.routing.prefix_index import PrefixIndex

MAX_REMEMBERED_KEYS = 1 << 16
"""Orders of affinity that are kept, so that the next turn of a conversation need not hash every replica."""

MAX_REMEMBERED_CHARACTERS = 256
"""Of a key that is kept: callers choose them, and longer ones could take any memory."""


class LiveFleet:
    """A `policies.fleet.FleetView` of what a router keeps. The router alone changes it, by `replace` and
    `refresh`."""

    def __init__(self, prefixes: PrefixIndex) -> None:
        self._prefixes = prefixes
        self._members: list[ReplicaLoad] = []
        self._by_id: dict[str, ReplicaLoad] = {}
        # (load, position, version): of each member the newest entry counts; others are dropped when met.
        self._heap: list[tuple[float, int, int]] = []
        self._total = 0.0
        self._affinity: Affinity | None = None  # made when it is asked for
        self._orders: dict[tuple[str, int], tuple[str, ...]] = {}

    # --- what a policy asks ----------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index: int) -> ReplicaView:
        return self._members[index].view()

    def __iter__(self) -> Iterator[ReplicaView]:
        return (member.view() for member in self._members)

    def __contains__(self, replica_id: object) -> bool:
        """Whether a replica of that id may take a request."""
        return replica_id in self._by_id

    def find(self, replica_id: str) -> ReplicaView:
        return self._by_id[replica_id].view()

    def least_loaded(self) -> ReplicaView:
        heap, members = self._heap, self._members
        while True:
            _, position, version = heap[0]
            if members[position].version == version:
                return members[position].view()
            heapq.heappop(heap)

    def mean_load(self) -> float:
        return self._total / len(self._members)

    def longest_match(self, digests: Sequence[Digest]) -> PrefixMatch:
        return self._prefixes.longest_match(digests)

    def num_held(self, replica_id: str, digests: Sequence[Digest]) -> int:
        return self._prefixes.num_held(replica_id, digests)

    def by_affinity(self, key: str, count: int) -> Sequence[str]:
        order = self._orders.get((key, count))
        if order is None:
            if self._affinity is None:
                self._affinity = Affinity((m.replica.replica_id, m.replica.capacity) for m in self._members)
            order = self._affinity.first(key, count)
            if len(key) > MAX_REMEMBERED_CHARACTERS:
                return order
            if len(self._orders) >= MAX_REMEMBERED_KEYS:
                self._orders.clear()
            self._orders[key, count] = order
        return order

    # --- what the router tells -------------------------------------------------------------

    def replace(self, members: Sequence[ReplicaLoad]) -> None:
        """Another set of replicas, in order of joining."""
        self._members = list(members)
        self._by_id = {member.replica.replica_id: member for member in members}
        self._affinity = None
        self._orders.clear()
        for position, member in enumerate(members):
            member.position = position
        self._rebuild()

    def refresh(self, member: ReplicaLoad) -> None:
        """The load of one of them may have changed."""
        before, load = member.shown_load, member.load
        if load == before:
            return
        member.shown_load = load
        member.version += 1
        self._total += load - before
        heapq.heappush(self._heap, (load, member.position, member.version))
        if len(self._heap) > 4 * len(self._members) + 64:
            self._rebuild()

    def _rebuild(self) -> None:
        for member in self._members:
            member.shown_load = member.load
        self._total = sum(member.shown_load for member in self._members)
        self._heap = [(member.shown_load, member.position, member.version) for member in self._members]
        heapq.heapify(self._heap)
