"""Planted bugs of the router, for its machine. See `bad_machines`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pageturner.policies.fleet import Digest
from pageturner.service.routing.fleet import LiveFleet
from pageturner.service.routing.load import ReplicaLoad
from pageturner.service.routing.options import LoadReport, Routed
from pageturner.service.routing.prefix_index import PrefixIndex
from pageturner.service.routing.router import Router


@dataclass(frozen=True, slots=True)
class RoutingBug:
    """owner.method is replaced by `mistake(original)`. caught_by: how the assertion begins."""

    name: str
    owner: type[Any]
    method: str
    mistake: Callable[[Any], Any]
    caught_by: tuple[str, ...]


def _counts_an_end_twice(original: Any) -> Any:
    def ended(self: ReplicaLoad, routed: Routed) -> None:
        if routed.number not in self._open:
            self._since_requests -= 1
            return
        original(self, routed)

    return ended


def _forgets_what_was_sent_since(original: Any) -> Any:
    def reported(self: ReplicaLoad, report: LoadReport, mark: int) -> None:
        original(self, report, mark)
        self._since_tokens = self._since_requests = 0

    return reported


def _takes_an_old_report(original: Any) -> Any:
    def reported(self: ReplicaLoad, report: LoadReport, mark: int) -> None:
        self._mark = min(self._mark, mark)
        original(self, report, mark)

    return reported


def _counts_the_prompt_of_a_started_request(original: Any) -> Any:
    def computed(self: ReplicaLoad, routed: Routed) -> None:
        return None

    return computed


def _keeps_an_old_entry(original: Any) -> Any:
    def refresh(self: LiveFleet, member: ReplicaLoad) -> None:
        version = member.version
        original(self, member)
        member.version = version

    return refresh


def _loses_the_total(original: Any) -> Any:
    def refresh(self: LiveFleet, member: ReplicaLoad) -> None:
        total = self._total
        original(self, member)
        self._total = total

    return refresh


def _touches_heads_first(original: Any) -> Any:
    def add(self: PrefixIndex, replica_id: str, digests: Sequence[Digest], tokens_per_digest: int) -> None:
        original(self, replica_id, tuple(reversed(digests)), tokens_per_digest)

    return add


def _never_touches(original: Any) -> Any:
    def add(self: PrefixIndex, replica_id: str, digests: Sequence[Digest], tokens_per_digest: int) -> None:
        new = [digest for digest in digests if digest not in self._held[replica_id]]
        original(self, replica_id, new, tokens_per_digest)

    return add


def _leaves_its_digests_behind(original: Any) -> Any:
    def leave(self: PrefixIndex, replica_id: str) -> None:
        del self._held[replica_id], self._capacity[replica_id], self._num_tokens[replica_id]

    return leave


def _sends_to_one_that_drains(original: Any) -> Any:
    def refill(self: Router) -> None:
        self._fleet.replace(list(self._replicas.values()))

    return refill


def _avoids_nothing(original: Any) -> Any:
    def without(self: Router, avoid: Any, digests: Any) -> Any:
        return self._fleet

    return without


def _keeps_orders_of_affinity(original: Any) -> Any:
    def replace(self: LiveFleet, members: Sequence[ReplicaLoad]) -> None:
        orders = dict(self._orders)
        original(self, members)
        self._orders = orders

    return replace


BUGS = (
    RoutingBug("an end counts twice", ReplicaLoad, "ended", _counts_an_end_twice, ("load",)),
    RoutingBug(
        "a report forgets what was sent",
        ReplicaLoad,
        "reported",
        _forgets_what_was_sent_since,
        ("load",),
    ),
    RoutingBug("an old report is taken", ReplicaLoad, "reported", _takes_an_old_report, ("load",)),
    RoutingBug(
        "a prompt waits after its first token",
        ReplicaLoad,
        "computed",
        _counts_the_prompt_of_a_started_request,
        ("load", "leak"),
    ),
    RoutingBug("an old entry counts", LiveFleet, "refresh", _keeps_an_old_entry, ("fleet: the least",)),
    RoutingBug("the total is lost", LiveFleet, "refresh", _loses_the_total, ("fleet: the mean",)),
    RoutingBug("heads go first", PrefixIndex, "add", _touches_heads_first, ("prefixes", "tokens")),
    RoutingBug("a use is no use", PrefixIndex, "add", _never_touches, ("prefixes", "tokens")),
    RoutingBug("digests stay", PrefixIndex, "leave", _leaves_its_digests_behind, ("bijection",)),
    RoutingBug("draining is ignored", Router, "_refill", _sends_to_one_that_drains, ("chosen", "fleet")),
    RoutingBug("nothing is avoided", Router, "_without", _avoids_nothing, ("avoid",)),
    RoutingBug(
        "orders outlive their fleet", LiveFleet, "replace", _keeps_orders_of_affinity, ("fleet: the order",)
    ),
)
