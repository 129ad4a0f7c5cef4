"""The servers that compute prompts for one that decodes: which is asked next, and which is left alone.

Each decoding server reckons by what it asked itself, as a router without reports does.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from pageturner.policies.views import Rates
from pageturner.service.backoff import rest_seconds

Server = TypeVar("Server")
"""How one is reached: a connection, or its number in a simulation."""

REFUSED_REST = 60.0
"""Seconds that one is left alone whose KV means nothing here: it must be started anew, with other weights."""


SLOWEST = 8.0
"""Times as long as its own computing a server lets a hand-over take, beyond its patience."""


def longest_seconds(rates: Rates, patience: float, num_tokens: int, num_context: int) -> float:
    """That the KV of so many tokens, behind others, may take to come, however steadily it does: by then they
    had been computed where they are wanted. rates: there. patience: seconds between two blocks."""
    return patience + SLOWEST * rates.prefill_seconds(num_tokens, num_context)


@dataclass(slots=True, eq=False)
class Peer(Generic[Server]):
    """One server. num_tokens: that it was asked for and has not given yet."""

    server: Server
    num_tokens: int = 0
    num_failures: int = 0
    rests_until: float = 0.0
    last_reason: str = ""


class Peers(Generic[Server]):
    """Bound to one thread. now: seconds, of any clock that never goes back."""

    def __init__(self, servers: Iterable[Server], now: Callable[[], float]) -> None:
        self._peers = [Peer(server) for server in servers]
        self._now = now

    def __iter__(self) -> Iterator[Peer[Server]]:
        return iter(self._peers)

    def choose(self, asked: Container[Peer[Server]] = ()) -> Peer[Server] | None:
        """The one that has fewest tokens to compute for this server, and longest ago had to; None while all
        but those that were asked are left alone."""
        now = self._now()
        ready = [peer for peer in self._peers if peer.rests_until <= now and peer not in asked]
        if not ready:
            return None
        chosen = min(ready, key=lambda peer: peer.num_tokens)
        self._peers.remove(chosen)
        self._peers.append(chosen)  # of equals, the next one is another
        return chosen

    def succeeded(self, peer: Peer[Server]) -> None:
        """It gave what it was asked for."""
        peer.num_failures, peer.last_reason = 0, ""

    def failed(self, peer: Peer[Server], reason: str, *, is_refusal: bool) -> bool:
        """It did not, for this reason. Whether that is news.

        Calls that were under way there together fail together, and make its rest no longer.
        """
        now = self._now()
        if is_refusal:
            peer.rests_until = max(peer.rests_until, now + REFUSED_REST)
        elif peer.rests_until <= now:
            peer.rests_until = now + rest_seconds(peer.num_failures)
            peer.num_failures += 1
        is_news, peer.last_reason = reason != peer.last_reason, reason
        return is_news
