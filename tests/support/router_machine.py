"""Any moves on a router, beside a model that keeps all history and reckons everything anew each time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from random import Random

from pageturner.policies import registry
from pageturner.policies.fleet import Digest, ListedFleet
from pageturner.policies.interfaces import RoutingPolicy
from pageturner.service.errors import NoReplica
from pageturner.service.routing.options import LoadReport, Replica, Routed, RouterOptions
from pageturner.service.routing.router import Router

REQUEST_TOKENS = 100.0
TOKENS_PER_DIGEST = 16
CHAINS: tuple[tuple[Digest, ...], ...] = tuple(
    tuple(f"{chain[: depth + 1]}".encode() for depth in range(len(chain)))
    for chain in ("a", "abcde", "abcdefgh", "abxyz", "q", "qrst")
)
"""Chains of which some begin alike: a digest names all letters before it."""


@dataclass(slots=True)
class SentRequest:
    """computed_at, ended_at: the moves at which that was told; None before."""

    routed: Routed
    computed_at: int | None = None
    ended_at: int | None = None


@dataclass(slots=True)
class ModelReplica:
    """Everything that was ever told of a replica."""

    replica: Replica
    is_draining: bool = False
    report: LoadReport = LoadReport(0, 0)
    mark: int = 0
    reported_at: int = -1
    sent: list[SentRequest] = field(default_factory=list)
    used: list[Digest] = field(default_factory=list)
    """Digests by the last use, the oldest first."""

    def num_queued_tokens(self) -> int:
        counted = [each for each in self.sent if each.routed.number < self.mark]
        settled = sum(e.routed.num_tokens for e in counted if (e.computed_at or -1) > self.reported_at)
        since = sum(
            e.routed.num_tokens
            for e in self.sent
            if e.routed.number >= self.mark and e.computed_at is None and e.ended_at is None
        )
        return max(0, self.report.num_queued_tokens - settled) + since

    def num_requests(self) -> int:
        counted = [each for each in self.sent if each.routed.number < self.mark]
        ended = sum((e.ended_at or -1) > self.reported_at for e in counted)
        since = sum(e.routed.number >= self.mark and e.ended_at is None for e in self.sent)
        num_open = sum(e.ended_at is None for e in self.sent)
        return max(max(0, self.report.num_requests - ended) + since, num_open)

    def load(self) -> float:
        return (self.num_queued_tokens() + REQUEST_TOKENS * self.num_requests()) / self.replica.capacity

    def use(self, digests: tuple[Digest, ...]) -> None:
        for digest in reversed(digests):
            if digest in self.used:
                self.used.remove(digest)
            self.used.append(digest)
        while self.replica.cache_tokens and len(self.used) * TOKENS_PER_DIGEST > self.replica.cache_tokens:
            del self.used[0]


class RouterMachine:
    """seed: of every move. policy: which one routes; by default one that the seed draws."""

    def __init__(self, seed: int, policy: RoutingPolicy | None = None) -> None:
        self.rng = Random(seed)
        self.policy = policy or registry.create("routing", self.rng.choice(registry.names("routing")))
        self.router = Router(
            self.policy, Random(seed + 1).randrange, RouterOptions(request_tokens=REQUEST_TOKENS)
        )
        self.replicas: dict[str, ModelReplica] = {}
        self.gone: list[Routed] = []
        self._names = (f"r{number}" for number in itertools.count())
        self._num_moves = 0

    def run(self, num_moves: int) -> None:
        """Make so many moves, each checked. Raises AssertionError, which begins with what does not hold."""
        moves = (
            *([self._route] * 8),
            *([self._compute] * 3),
            *([self._end] * 5),
            *([self._report] * 2),
            self._join,
            self._leave,
            self._drain,
            self._undrain,
            self._hold,
            self._drop,
            self._tell_again,
        )
        for _ in range(num_moves):
            self._num_moves += 1
            self.rng.choice(moves)()
            self.check()
        self._end_all()

    # --- moves -----------------------------------------------------------------------------

    def _join(self) -> None:
        if len(self.replicas) < 8:
            capacity = self.rng.choice((1.0, 1.0, 0.5, 4.0))
            replica = Replica(next(self._names), capacity, self.rng.choice((0, 64, 128, 1 << 20)))
            self.router.join(replica)
            self.replicas[replica.replica_id] = ModelReplica(replica)

    def _leave(self) -> None:
        name = self._any()
        if name is not None and self.rng.random() < 0.4:
            self.gone += [each.routed for each in self.replicas.pop(name).sent]
            self.router.leave(name)

    def _drain(self) -> None:
        name = self._any()
        if name is not None and self.rng.random() < 0.6:
            self.replicas[name].is_draining = True
            self.replicas[name].used = []
            self.router.drain(name)

    def _undrain(self) -> None:
        name = self._any()
        if name is not None:
            self.replicas[name].is_draining = False
            self.router.undrain(name)

    def _route(self) -> None:
        rng = self.rng
        digests = rng.choice(CHAINS)[: rng.randint(0, 8)]
        num_prompt = len(digests) * TOKENS_PER_DIGEST + rng.randint(1, 40)
        avoid = {name for name in self.replicas if rng.random() < 0.15}
        open_ids = [name for name, each in self.replicas.items() if not each.is_draining]
        before = self.router.mark()
        try:
            routed = self.router.route(
                num_prompt_tokens=num_prompt,
                digests=digests,
                tokens_per_digest=TOKENS_PER_DIGEST,
                session=rng.choice(("", "s1", "s2")),
                avoid=avoid,
            )
        except NoReplica:
            assert not open_ids, "refused: a replica may take requests"
            assert self.router.mark() == before, "refused: a refusal changes nothing"
            return
        chosen = self.replicas[routed.replica_id]
        assert routed.replica_id in open_ids, f"chosen: {routed.replica_id} drains"
        allowed = [name for name in open_ids if name not in avoid] or open_ids
        assert {routed.replica_id, *routed.others} <= set(allowed), "avoid: one to be avoided was chosen"
        held = len(list(itertools.takewhile(chosen.used.__contains__, digests)))
        expected = num_prompt - held * TOKENS_PER_DIGEST
        assert routed.num_tokens == expected, f"tokens: {routed.num_tokens} to compute, not {expected}"
        chosen.sent.append(SentRequest(routed))
        if chosen.replica.cache_tokens:
            chosen.use(digests)

    def _compute(self) -> None:
        for each in self._some_open():
            if each.computed_at is None:
                each.computed_at = self._num_moves
            self.router.computed(each.routed)

    def _end(self) -> None:
        for each in self._some_open():
            each.computed_at = each.computed_at or self._num_moves
            each.ended_at = self._num_moves
            self.router.ended(each.routed)

    def _report(self) -> None:
        name = self._any()
        if name is None:
            return
        mark = self.router.mark() - self.rng.choice((0, 0, 1, 2, 9))
        report = LoadReport(self.rng.choice((0, 50, 5000)), self.rng.choice((0, 1, 20)))
        self.router.report(name, report, mark)
        model = self.replicas[name]
        if mark >= model.mark:
            model.report, model.mark, model.reported_at = report, mark, self._num_moves
        self.router.report("nobody", report, mark)

    def _hold(self) -> None:
        name = self._any()
        if name is not None:
            digests = self.rng.choice(CHAINS)
            self.router.holds(name, digests, TOKENS_PER_DIGEST)
            if not self.replicas[name].is_draining:
                self.replicas[name].use(digests)

    def _drop(self) -> None:
        """A cache evicts tails: the digest that was used longest ago is one."""
        name = self._any()
        if name is not None and self.replicas[name].used:
            digest = self.replicas[name].used.pop(0)
            self.router.dropped(name, (digest, b"unknown"))

    def _tell_again(self) -> None:
        for model in self.replicas.values():
            for each in model.sent[-2:]:
                if each.ended_at is not None:
                    self.router.ended(each.routed)
                    self.router.computed(each.routed)
        for routed in self.gone[-2:]:
            self.router.ended(routed)

    def _end_all(self) -> None:
        for name, model in self.replicas.items():
            for each in model.sent:
                self.router.ended(each.routed)
            self.router.report(name, LoadReport(0, 0), self.router.mark())
            assert self.router.view(name).load == 0, f"leak: {name} has a load, and nothing to do"

    def _any(self) -> str | None:
        return self.rng.choice(list(self.replicas)) if self.replicas else None

    def _some_open(self) -> list[SentRequest]:
        sent = [each for model in self.replicas.values() for each in model.sent if each.ended_at is None]
        return self.rng.sample(sent, min(len(sent), 2))

    # --- what must hold --------------------------------------------------------------------

    def check(self) -> None:
        router = self.router
        assert router.replica_ids == tuple(self.replicas), "members: another set of replicas"
        for name, model in self.replicas.items():
            view = router.view(name)
            assert router.is_draining(name) == model.is_draining, f"members: {name} drains or not"
            assert view.num_queued_tokens == model.num_queued_tokens(), f"load: queued tokens of {name}"
            assert view.num_requests == model.num_requests(), f"load: requests of {name}"
            assert view.load == model.load(), f"load: of {name}"
        self._check_fleet()

    def _check_fleet(self) -> None:
        live, prefixes = self.router._fleet, self.router._prefixes
        prefixes.check_integrity()
        members = [name for name, model in self.replicas.items() if not model.is_draining]
        assert [view.replica_id for view in live] == members, "fleet: another set"
        if not members:
            return
        listed = ListedFleet(
            tuple(self.router.view(name) for name in members),
            {name: frozenset(self.replicas[name].used) for name in members},
        )
        assert live.least_loaded() == listed.least_loaded(), "fleet: the least loaded"
        assert abs(live.mean_load() - listed.mean_load()) < 1e-6 * (1 + listed.mean_load()), "fleet: the mean"
        assert live.by_affinity("key", 2) == listed.by_affinity("key", 2), "fleet: the order of a key"
        for digests in CHAINS:
            found, expected = live.longest_match(digests), listed.longest_match(digests)
            assert found.num_digests == expected.num_digests, "prefixes: how much is held"
            assert sorted(found.replica_ids) == sorted(expected.replica_ids), "prefixes: who holds it"
            for name in members:
                same = live.num_held(name, digests) == listed.num_held(name, digests)
                assert same, f"prefixes: how much {name} holds"
