"""What a router is told of its replicas and of requests: frozen values."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """How a router reckons."""

    request_tokens: float = 512.0
    """What a request costs beside its prompt, in tokens of prompt: an answer's tokens are few, but each takes
    a share of a step of its own."""

    def __post_init__(self) -> None:
        """Raises ValueError for a number that no load could be reckoned with."""
        if not 0 <= self.request_tokens < math.inf:
            raise ValueError(f"request_tokens must be finite and at least 0, not {self.request_tokens}")


@dataclass(frozen=True, slots=True)
class Replica:
    """A server that joins."""

    replica_id: str
    capacity: float = 1.0
    """Its speed beside that of the others."""
    cache_tokens: int = 1 << 18
    """Tokens of KV that its prefix cache is taken to hold, the least recently sent forgotten first. 0: what
    it holds is told by `Router.holds` and `Router.dropped` alone."""

    def __post_init__(self) -> None:
        """Raises ValueError for what no router could send to."""
        if not self.replica_id:
            raise ValueError("a replica needs an id")
        if not 0 < self.capacity < math.inf:
            raise ValueError(f"capacity must be finite and above 0, not {self.capacity}")
        if self.cache_tokens < 0:
            raise ValueError(f"cache_tokens must be at least 0, not {self.cache_tokens}")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a replica said of itself."""

    num_queued_tokens: int
    """Tokens of prompts that it had yet to compute."""
    num_requests: int
    """Requests there, running, waiting or swapped out."""


@dataclass(frozen=True, slots=True)
class Routed:
    """A request that was given to a replica. Handed back to the router when its prompt is computed (its first
    token came) and when it ends, however it ends."""

    number: int
    replica_id: str
    others: tuple[str, ...]
    """Where it would go next, best first, if this one does not take it."""
    num_tokens: int
    """Tokens of its prompt that the replica is believed to lack."""
