"""The servers that compute prompts for this one: which of them is asked next, and which is left alone."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from pageturner.service.client.async_connection import AsyncConnection
from pageturner.service.client.backoff import rest_seconds
from pageturner.service.core.clock import Clock

REFUSED_REST = 60.0
"""Seconds that one is left alone whose KV means nothing here: it must be started anew, with other weights."""


@dataclass(slots=True, eq=False)
class Peer:
    """One server. num_tokens: that it was asked for and has not given yet."""

    connection: AsyncConnection
    num_tokens: int = 0
    num_failures: int = 0
    rests_until: float = 0.0
    last_reason: str = ""

    @property
    def address(self) -> str:
        """Where it is."""
        return self.connection.target.address


class Peers:
    """Lives on the event loop."""

    def __init__(self, connections: tuple[AsyncConnection, ...], clock: Clock) -> None:
        self._peers = [Peer(connection) for connection in connections]
        self._clock = clock

    def choose(self, asked: Container[Peer] = ()) -> Peer | None:
        """The one that has fewest tokens to compute for this server, and longest ago had to; None while all
        but those that were asked are left alone."""
        now = self._clock.now()
        ready = [peer for peer in self._peers if peer.rests_until <= now and peer not in asked]
        if not ready:
            return None
        chosen = min(ready, key=lambda peer: peer.num_tokens)
        self._peers.remove(chosen)
        self._peers.append(chosen)  # of equals, the next one is another
        return chosen

    def succeeded(self, peer: Peer) -> None:
        """It gave what it was asked for."""
        peer.num_failures, peer.last_reason = 0, ""

    def failed(self, peer: Peer, reason: str, *, is_refusal: bool) -> bool:
        """It did not, for this reason. Whether that is news.

        Calls that were under way there together fail together, and make its rest no longer.
        """
        now = self._clock.now()
        if is_refusal:
            peer.rests_until = max(peer.rests_until, now + REFUSED_REST)
        elif peer.rests_until <= now:
            peer.rests_until = now + rest_seconds(peer.num_failures)
            peer.num_failures += 1
        is_news, peer.last_reason = reason != peer.last_reason, reason
        return is_news

    async def close(self) -> None:
        """Let go of the connections."""
        for peer in self._peers:
            await peer.connection.close()
