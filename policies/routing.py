"""Which replica takes a request, where several servers share the load?

What a choice costs is known in tokens: those that wait before it at a replica (`ReplicaView.load`), and those
of its own prompt that the replica's prefix cache lacks. The policies differ in which of the two they heed,
and in how much of the fleet they look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pageturner.policies.fleet import Draw, FleetView, ReplicaView, RoutedRequest
from pageturner.policies.options import check_option


@dataclass(frozen=True, slots=True)
class PrefixAware:
    """The replica that holds most of the prompt, unless it is too busy for what that saves.

    Too busy: its load is above `max_imbalance` times that of the least loaded (of all, or of as many as
    `fallback_choices` draws), and by more than `saved_weight` for each token that need not be computed. Then,
    or if less than `min_match` of the prompt is held, the least loaded takes it. So no choice is worse than
    that one by more than the bound, and a prefix that everyone asks for spreads to as many replicas as it
    keeps busy. Of many that hold the same, that one is meant if it is among them, else the least loaded of
    `choices` that are drawn.

    Source: the cache-aware policy of SGLang's gateway (match unless load differs by a factor and a sum; its
    defaults are 1.5 and 64 requests, and 0.3 of the prompt), with the sum in tokens saved as in Preble
    (Srivatsa et al., 2024) and the cost function of NVIDIA Dynamo's KV router; llm-d's scheduler weighs
    match, queue and KV use by 3, 2 and 2.
    """

    name: ClassVar[str] = "prefix-aware"
    summary: ClassVar[str] = "wins where prompts share prefixes; loses to least-tokens where none are shared"

    max_imbalance: float = 1.5
    """Times the least load that a holder of the prefix may have for nothing."""
    saved_weight: float = 2.0
    """Tokens of load beyond that for each token saved: more than 1, since computing a prefix once more also
    takes its room in another cache."""
    min_match: float = 0.1
    """The share of the prompt that is worth heeding."""
    choices: int = 2
    """Holders that are looked at, drawn where there are more."""
    fallback_choices: int = 0
    """Replicas that are drawn where no holder is taken; 0: all are looked at. 2 where many routers, or old
    loads, would all send to the same one."""

    def __post_init__(self) -> None:
        check_option(self, "max_imbalance", at_least=1)
        check_option(self, "saved_weight", at_least=0)
        check_option(self, "min_match", at_least=0, at_most=1)
        check_option(self, "choices", at_least=1)
        check_option(self, "fallback_choices", at_least=0)

    def route(self, request: RoutedRequest, fleet: FleetView, draw: Draw) -> Sequence[str]:
        least = _least_loaded(fleet, self.fallback_choices, draw)
        match = fleet.longest_match(request.digests)
        saved = request.cached_tokens(match.num_digests)
        if not saved or saved < self.min_match * request.num_prompt_tokens:
            return (least.replica_id,)
        holders = match.replica_ids
        if fleet.num_held(least.replica_id, request.digests) == match.num_digests:
            return (least.replica_id,)
        drawn = [fleet.find(holders[index]) for index in _drawn(len(holders), self.choices, draw)]
        best = min(drawn, key=_load)
        if best.load > self.max_imbalance * least.load + self.saved_weight * saved:
            best = least
        return tuple(dict.fromkeys((best.replica_id, least.replica_id)))


@dataclass(frozen=True, slots=True)
class LeastTokens:
    """The least loaded replica, by tokens and not by requests.

    Source: join the shortest queue (Winston, 1977), with the work in place of the count, since prompts differ
    in length by orders of magnitude.
    """

    name: ClassVar[str] = "least-tokens"
    summary: ClassVar[str] = (
        "wins where lengths are very unequal; loses to stale loads, and to shared prefixes"
    )

    def route(self, request: RoutedRequest, fleet: FleetView, draw: Draw) -> Sequence[str]:
        return (fleet.least_loaded().replica_id,)


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """One replica after the other.

    Source: gRPC's round_robin, and what a Kubernetes service comes to.
    """

    name: ClassVar[str] = "round-robin"
    summary: ClassVar[str] = "wins where requests are alike and loads unknown; loses to any skew in length"

    def route(self, request: RoutedRequest, fleet: FleetView, draw: Draw) -> Sequence[str]:
        return (fleet[request.number % len(fleet)].replica_id,)


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """The less loaded of two drawn replicas, or of `choices`.

    Many routers with old loads do not all run to the same replica, as they do with the least loaded one.
    Source: the power of two choices (Mitzenmacher, 2001; with old loads Mitzenmacher, 2000); Ray Serve's
    default.
    """

    name: ClassVar[str] = "power-of-two"
    summary: ClassVar[str] = "wins where loads are old or routers many; loses a little to fresh least-tokens"

    choices: int = 2
    """Replicas that are drawn."""

    def __post_init__(self) -> None:
        check_option(self, "choices", at_least=1)

    def route(self, request: RoutedRequest, fleet: FleetView, draw: Draw) -> Sequence[str]:
        return (_least_loaded(fleet, self.choices, draw).replica_id,)


@dataclass(frozen=True, slots=True)
class SessionAffinity:
    """A conversation stays with the replica that its name chooses, unless that one is overloaded.

    By rendezvous hashing: it needs no memory, many routers agree, and a replica that comes or goes moves only
    the sessions that are its own. A replica is passed over for the next in the session's order if its load is
    above `max_imbalance` times the fleet's mean and `slack_tokens`; of `order` replicas the least loaded is
    taken where all are. Requests of no session go to the least loaded.

    Source: Thaler and Ravishankar (1998); the bound is that of consistent hashing with bounded loads
    (Mirrokni, Thorup and Zadimoghaddam, 2018).
    """

    name: ClassVar[str] = "session"
    summary: ClassVar[str] = (
        "wins for chats where no digest is known; loses to prefixes that many users share"
    )

    max_imbalance: float = 2.0
    """Times the mean load at which a replica is passed over."""
    slack_tokens: float = 8192.0
    """Load that no replica is passed over for, however idle the others are."""
    order: int = 3
    """Replicas of a session that are tried."""

    def __post_init__(self) -> None:
        check_option(self, "max_imbalance", at_least=1)
        check_option(self, "slack_tokens", at_least=0)
        check_option(self, "order", at_least=1)

    def route(self, request: RoutedRequest, fleet: FleetView, draw: Draw) -> Sequence[str]:
        if not request.session:
            return (fleet.least_loaded().replica_id,)
        own = [fleet.find(name) for name in fleet.by_affinity(request.session, self.order)]
        bound = self.max_imbalance * fleet.mean_load() + self.slack_tokens
        chosen = next((replica for replica in own if replica.load <= bound), None) or min(own, key=_load)
        return chosen.replica_id, *(replica.replica_id for replica in own if replica is not chosen)


def _least_loaded(fleet: FleetView, num_drawn: int, draw: Draw) -> ReplicaView:
    """Of so many that are drawn; of all for 0."""
    if not num_drawn:
        return fleet.least_loaded()
    return min((fleet[index] for index in _drawn(len(fleet), num_drawn, draw)), key=_load)


def _load(replica: ReplicaView) -> float:
    return replica.load


def _drawn(size: int, count: int, draw: Draw) -> Sequence[int]:
    """`count` different indices below `size`, each set as likely; all if there are no more.

    Robert Floyd's sampling (Bentley, 1987).
    """
    if size <= count:
        return range(size)
    chosen: list[int] = []
    for last in range(size - count, size):
        index = draw(last + 1)
        chosen.append(last if index in chosen else index)
    return chosen
