"""The router: one policy, the replicas it chooses from, and what became of the choices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import replace

from pageturner.policies import registry
from pageturner.policies.fleet import Digest, Draw, ListedFleet, ReplicaView, RoutedRequest
from pageturner.policies.interfaces import RoutingPolicy
from pageturner.service.errors import NoReplica
from pageturner.service.policy_host import answers
from pageturner.service.policy_host.active_policy import ActivePolicy, FaultLimits
from pageturner.service.policy_host.calls import CallWatch, PolicyCaller
from pageturner.service.policy_host.reports import FaultNote
from pageturner.service.routing.fleet import LiveFleet
from pageturner.service.routing.load import ReplicaLoad
from pageturner.service.routing.options import LoadReport, Replica, Routed, RouterOptions
from pageturner.service.routing.prefix_index import PrefixIndex

_AXIS = "routing"


class Router:
    """Chooses a replica for each request, and learns of each what there is to be learnt.

        router = Router(policy, draw)
        router.join(Replica("a"), Replica("b"))
        routed = router.route(num_prompt_tokens=900, digests=digests, session="chat 7")
        ...                        # send it to routed.replica_id; if that refuses, ended, and route again
        router.computed(routed)    # its first token came
        router.ended(routed)       # it ended, whichever way

    Loads that replicas report are better than what the router alone can know, where others send to them too:

        mark = router.mark()       # before the load is asked for
        router.report("a", LoadReport(num_queued_tokens=..., num_requests=...), mark)

    policy: whatever it does, a replica of the fleet is chosen: a bad answer is counted and replaced by that
    of the axis's default, and a policy that keeps failing is quarantined, as a scheduler's are.
    draw: all chance. on_fault: told of the 1st, 2nd, 4th, 8th, ... bad answer, for the log.
    watch: as of `policy_host`; by default signals pass through a policy's call.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        draw: Draw,
        options: RouterOptions | None = None,
        *,
        limits: FaultLimits | None = None,
        watch: CallWatch | None = None,
        on_fault: Callable[[FaultNote], None] | None = None,
    ) -> None:
        self._draw = draw
        self._options = options or RouterOptions()
        self._on_fault = on_fault
        self._prefixes = PrefixIndex()
        self._fleet = LiveFleet(self._prefixes)
        self._replicas: dict[str, ReplicaLoad] = {}
        self._draining: set[str] = set()
        self._number = 0
        self._start = draw(1 << 16)
        self._limits, self._watch = limits or FaultLimits(), watch or CallWatch()
        self._active = self._activate(policy)

    # --- the replicas ----------------------------------------------------------------------

    @property
    def replica_ids(self) -> tuple[str, ...]:
        """All, in the order in which they joined; those that drain too."""
        return tuple(self._replicas)

    def join(self, *replicas: Replica) -> None:
        """Replicas that may take requests from now on. Raises ValueError, and takes none, if one of them is
        there already."""
        counts = Counter(replica.replica_id for replica in replicas)
        known = [name for name, count in counts.items() if count > 1 or name in self._replicas]
        if known:
            raise ValueError(f"replica {known[0]!r} is there already")
        for replica in replicas:
            self._replicas[replica.replica_id] = ReplicaLoad(replica, self._options.request_tokens)
            self._prefixes.join(replica.replica_id, replica.cache_tokens)
        self._refill()

    def leave(self, replica_id: str) -> None:
        """A replica that is no more: what it held and had under way is forgotten. No matter if it is not
        there."""
        if self._replicas.pop(replica_id, None) is not None:
            if replica_id not in self._draining:
                self._prefixes.leave(replica_id)
            self._draining.discard(replica_id)
            self._refill()

    def drain(self, replica_id: str) -> None:
        """Send it nothing more; what it has under way goes on to its end. Nothing is known of its cache if it
        comes back by `undrain`. No matter if it drains already or is not there."""
        if replica_id in self._replicas and replica_id not in self._draining:
            self._draining.add(replica_id)
            self._prefixes.leave(replica_id)
            self._refill()

    def undrain(self, replica_id: str) -> None:
        """Send to it again. No matter if it does not drain."""
        if replica_id in self._draining:
            self._draining.remove(replica_id)
            self._prefixes.join(replica_id, self._replicas[replica_id].replica.cache_tokens)
            self._refill()

    def resize(self, replica_id: str, cache_tokens: int) -> None:
        """A replica's prefix cache holds more or less than was known when it joined. As of
        `Replica.cache_tokens`. No matter if it is not there."""
        found = self._replicas.get(replica_id)
        if found is not None and found.replica.cache_tokens != cache_tokens:
            found.replica = replace(found.replica, cache_tokens=cache_tokens)
            if replica_id not in self._draining:
                self._prefixes.resize(replica_id, cache_tokens)

    def is_draining(self, replica_id: str) -> bool:
        """Whether it takes nothing more."""
        return replica_id in self._draining

    def view(self, replica_id: str) -> ReplicaView:
        """A replica as the policy sees it. Raises KeyError."""
        return self._replicas[replica_id].view()

    def mark(self) -> int:
        """The number of the next request: what is sent from now on is not in a load asked for now."""
        return self._number

    def report(self, replica_id: str, report: LoadReport, mark: int) -> None:
        """What a replica said of its load, which was asked for at `mark`. One of a replica that is not there,
        or older than the last, changes nothing."""
        found = self._replicas.get(replica_id)
        if found is not None:
            found.reported(report, mark)
            self._changed(replica_id, found)

    def holds(self, replica_id: str, digests: Sequence[Digest], tokens_per_digest: int) -> None:
        """A replica says that it holds this chain. No matter if it is not there, or drains."""
        if replica_id in self._fleet:
            self._prefixes.add(replica_id, digests, tokens_per_digest)

    def dropped(self, replica_id: str, digests: Sequence[Digest]) -> None:
        """A replica says that it holds these no more."""
        if replica_id in self._fleet:
            self._prefixes.forget(replica_id, digests)

    # --- requests --------------------------------------------------------------------------

    def route(
        self,
        *,
        num_prompt_tokens: int,
        digests: tuple[Digest, ...] = (),
        tokens_per_digest: int = 16,
        session: str = "",
        priority: int = 0,
        tenant: str = "",
        avoid: Container[str] = (),
    ) -> Routed:
        """Choose a replica. The arguments are those of RoutedRequest.

        avoid: replicas that failed this request or refused it; all others are tried before one of them.
        Raises NoReplica if none may take it.
        """
        if not self._fleet:
            count = len(self._replicas)
            raise NoReplica(f"all {count} known servers drain" if count else "no server is known")
        fleet = self._without(avoid, digests) if avoid else self._fleet
        request = RoutedRequest(
            self._start + self._number,
            num_prompt_tokens,
            digests,
            tokens_per_digest,
            session,
            priority,
            tenant,
        )
        order = self._active.ask(answers.replica_order(fleet), request, fleet, self._draw)
        chosen = order[0]
        held = self._prefixes.num_held(chosen, digests) if digests else 0
        routed = Routed(
            self._number, chosen, tuple(order[1:]), num_prompt_tokens - request.cached_tokens(held)
        )
        self._number += 1
        found = self._replicas[chosen]
        found.sent(routed)
        self._fleet.refresh(found)
        if digests and found.replica.cache_tokens:
            self._prefixes.add(chosen, digests, tokens_per_digest)
        return routed

    def computed(self, routed: Routed) -> None:
        """The request's first token came: its prompt waits no more. May be left out, or told again."""
        found = self._replicas.get(routed.replica_id)
        if found is not None:
            found.computed(routed)
            self._changed(routed.replica_id, found)

    def ended(self, routed: Routed) -> None:
        """The request ended, was refused, or failed. May be told again."""
        found = self._replicas.get(routed.replica_id)
        if found is not None:
            found.ended(routed)
            self._changed(routed.replica_id, found)

    # --- the policy ------------------------------------------------------------------------

    @property
    def policy(self) -> RoutingPolicy:
        """The one that was set, quarantined or not."""
        policy: RoutingPolicy = self._active.chosen.policy
        return policy

    @property
    def num_faults(self) -> int:
        """Bad answers of the policy since it was set."""
        return self._active.num_faults

    @property
    def quarantine_reason(self) -> str:
        """Why the axis's default decides instead; empty while the policy does."""
        return self._active.quarantine_reason

    def set_policy(self, policy: RoutingPolicy) -> None:
        """Another policy decides from now on, with no fault to its name."""
        self._active = self._activate(policy)

    # --- inside ----------------------------------------------------------------------------

    def _activate(self, policy: RoutingPolicy) -> ActivePolicy:
        default = registry.create(_AXIS, registry.DEFAULTS[_AXIS])
        trusted = PolicyCaller(_AXIS, default, self._watch, lambda _: None)
        return ActivePolicy(
            _AXIS,
            policy,
            trusted,
            self._watch,
            self._limits,
            on_fault=self._tell,
            on_quarantine=lambda _: None,
        )

    def _tell(self, axis: str, note: FaultNote | None) -> None:
        if note is not None and self._on_fault is not None:
            self._on_fault(note)

    def _refill(self) -> None:
        self._fleet.replace(
            [load for replica_id, load in self._replicas.items() if replica_id not in self._draining]
        )

    def _changed(self, replica_id: str, load: ReplicaLoad) -> None:
        if replica_id not in self._draining:
            self._fleet.refresh(load)

    def _without(self, avoid: Container[str], digests: Sequence[Digest]) -> LiveFleet | ListedFleet:
        """The fleet without those to be avoided, unless that leaves none."""
        left = tuple(replica for replica in self._fleet if replica.replica_id not in avoid)
        if not left or len(left) == len(self._fleet):
            return self._fleet
        depths = {r.replica_id: self._prefixes.num_held(r.replica_id, digests) for r in left}
        return ListedFleet(left, {name: frozenset(digests[:depth]) for name, depth in depths.items()})
