"""What the comparison needs of an engine; an adapter a peer implements it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from pageturner.loadtest.client import RequestRecord
from pageturner.loadtest.peers.cases import Demand
from pageturner.loadtest.workload import PlannedRequest

Send = Callable[[PlannedRequest, float], Awaitable[RequestRecord]]
"""Sends a request that was due at a moment of the monotonic clock and reads its answer to the end. What goes
wrong is in the record, never raised."""


@dataclass(frozen=True, slots=True)
class Command:
    """How a server is started. environment: beside what it inherits."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


class Peer(Protocol):
    """A kind of server. name: its heading in the table."""

    @property
    def name(self) -> str: ...

    def command(self, port: int, demand: Demand) -> Command:
        """Serve on that port of 127.0.0.1, with room for the demand."""
        ...

    def connected(self, address: str) -> AbstractAsyncContextManager[Send]:
        """A way to send to the server at host:port; open while it is used."""
        ...
