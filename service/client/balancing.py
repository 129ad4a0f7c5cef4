"""To which of several servers the next request goes, by their load, in turn, or by its conversation.

The decision is a routing policy's, as in the laboratory and behind a router (`policies/routing.py`). What it
looks at is what this client knows: what it has sent and seen end, and the load that servers report in the
trailers of calls (ORCA). A server that fails is left out for a while, and tried again.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from google.protobuf.message import DecodeError

from pageturner.policies import registry
from pageturner.service.backoff import rest_seconds
from pageturner.service.core.clock import Clock
from pageturner.service.errors import InvalidArgument, MixedServers, NoReplica
from pageturner.service.routing.options import LoadReport, Replica, Routed
from pageturner.service.routing.router import Router
from pageturner.service.rpc.load_report import (
    QUEUED_TOKENS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    OrcaLoadReport,
)

Balancing = Literal["round-robin", "least-load", "power-of-two", "session"]

POLICIES: dict[str, str] = {
    "round-robin": "round-robin",
    "least-load": "least-tokens",
    "power-of-two": "power-of-two",
    "session": "session",
}
"""The routing policy of each way to balance."""

Mixed = Literal["warn", "refuse", "allow"]

_OF_ANSWER = frozenset({"prompt", "grammar", "adapter"})
"""Parts of an answer's fingerprint that are not its server's."""


class MixedServersWarning(UserWarning):
    """Servers that a client balances over compute other tokens for the same request."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a choice hangs on. session: the conversation that a request belongs to; empty if none."""

    num_prompt_tokens: int = 0
    session: str = ""


class Balancer:
    """Decides; sends nothing, and waits for nothing. By address, so that many clients agree on sessions. From
    any thread.

    random: draws from [0, 1). mixed: what becomes of servers whose fingerprints differ from the first one's:
    `warn` says so once for each, `refuse` asks them for nothing.
    """

    def __init__(
        self,
        balancing: Balancing,
        addresses: Iterable[str],
        clock: Clock,
        random: Callable[[], float],
        mixed: Mixed = "warn",
    ) -> None:
        if balancing not in POLICIES:
            raise InvalidArgument("balancing", f"{balancing!r} is none of {', '.join(POLICIES)}")
        if mixed not in ("warn", "refuse", "allow"):
            raise InvalidArgument("mixed", f"{mixed!r} is none of warn, refuse, allow")
        self._clock = clock
        self._mixed = mixed
        self._lock = threading.Lock()
        policy = registry.create("routing", POLICIES[balancing])
        self._router = Router(policy, lambda count: min(count - 1, int(random() * count)))
        self._router.join(*map(Replica, addresses))
        self._num_failures: dict[str, int] = {}
        self._rests_until: dict[str, float] = {}
        self._fingerprints: dict[str, dict[str, str]] = {}

    def place(self, wanted: Wanted, avoid: Collection[str] = ()) -> Routed | None:
        """A server for a request; None while all are left out: then any may be tried."""
        with self._lock:
            self._readmit()
            try:
                return self._router.route(
                    num_prompt_tokens=wanted.num_prompt_tokens, session=wanted.session, avoid=avoid
                )
            except NoReplica:
                return None

    def computed(self, routed: Routed) -> None:
        """Its first token came."""
        with self._lock:
            self._router.computed(routed)

    def ended(self, routed: Routed) -> None:
        """It ended, however. May be told again."""
        with self._lock:
            self._router.ended(routed)

    def succeeded(self, address: str) -> None:
        """The server answers."""
        with self._lock:
            self._num_failures.pop(address, None)

    def failed(self, address: str) -> None:
        """It does not, for a reason of its own: it is left out for a while. Calls that were under way there
        fail with it, and say nothing new while it is left out."""
        with self._lock:
            if address in self._rests_until:
                return
            count = self._num_failures.get(address, 0)
            self._num_failures[address] = count + 1
            self._rests_until[address] = self._clock.now() + rest_seconds(count)
            self._router.drain(address)

    def report(self, address: str, serialized: bytes) -> None:
        """The load that came with the end of a call. One that can't be read tells nothing."""
        load = _read_load(serialized)
        if load is not None:
            with self._lock:
                self._router.report(address, load, self._router.mark())

    def note_fingerprint(self, address: str, fingerprint: str) -> None:
        """Of an answer that the server has begun. Raises MixedServers where it is to be refused.

        Each answer is looked at: between two of them a server may have been started anew, with other weights.
        """
        if not fingerprint or self._mixed == "allow":
            return
        parts = dict(part.partition("=")[::2] for part in fingerprint.split(";"))
        own = {name: value for name, value in parts.items() if name not in _OF_ANSWER}
        with self._lock:
            told = self._news(address, own)
        if told and self._mixed == "refuse":
            raise MixedServers(told)
        if told:
            warnings.warn(MixedServersWarning(told), stacklevel=2)

    def _news(self, address: str, own: dict[str, str]) -> str:
        """In what the server differs from the first of the others, where that was not told before."""
        known = self._fingerprints
        if known.get(address) == own:
            return ""
        known.pop(address, None)
        first = next(iter(known), address)
        differing = _differing(own, known.get(first, own))
        if not differing or self._mixed != "refuse":
            known[address] = own  # else it is not one of them, and may be started anew, as they are
        return f"{address} and {first} compute tokens otherwise: {differing}" if differing else ""

    def _readmit(self) -> None:
        now = self._clock.now()
        for address in [address for address, until in self._rests_until.items() if until <= now]:
            del self._rests_until[address]
            self._router.undrain(address)


class Placement:
    """One call's place among the servers. addresses: of all, by number."""

    def __init__(self, balancer: Balancer, wanted: Wanted, addresses: tuple[str, ...]) -> None:
        self._balancer = balancer
        self._wanted = wanted
        self._addresses = addresses
        self._routed: Routed | None = None

    def choose(self, avoid: Collection[int], otherwise: int) -> int:
        """The number of the server to ask now. avoid: those that failed this call. otherwise: where all that
        the balancer knows are left out."""
        self.end()
        self._routed = self._balancer.place(self._wanted, {self._addresses[server] for server in avoid})
        return otherwise if self._routed is None else self._addresses.index(self._routed.replica_id)

    def computed(self) -> None:
        """The first token came."""
        if self._routed is not None:
            self._balancer.computed(self._routed)

    def failed(self, server: int, *, is_away: bool) -> None:
        """The server failed this call. is_away: and would fail others."""
        if is_away:
            self._balancer.failed(self._addresses[server])

    def end(self) -> None:
        """The request is there no more. Saying it again is no error."""
        if self._routed is not None:
            self._balancer.ended(self._routed)
            self._routed = None


def _read_load(serialized: bytes) -> LoadReport | None:
    """None for what is no report, or has no number where one of ours has a count."""
    report: Any = OrcaLoadReport()
    try:
        report.ParseFromString(serialized)
        named = report.named_metrics
        if REQUESTS_RUNNING not in named:
            return None
        num_requests = int(named[REQUESTS_RUNNING]) + int(named.get(REQUESTS_WAITING, 0.0))
        return LoadReport(int(named.get(QUEUED_TOKENS, 0.0)), num_requests)
    except (DecodeError, ValueError, OverflowError):
        return None


def _differing(mine: dict[str, str], theirs: dict[str, str]) -> str:
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    return ", ".join(f"{name} ({mine.get(name, 'none')}, {theirs.get(name, 'none')})" for name in names)
