"""Prefill and decode apart: what stands between a fleet's servers, and what each keeps for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from pageturner.service.core.options import CacheOptions
from pageturner.service.simulator.machine import SimulatedMachine


@dataclass(frozen=True, slots=True)
class Handover:
    """How prompts go from the servers that prefill to those that decode.

    link_gbs: 1e9 bytes a second that a server sends, and that another takes in, over all hand-overs.
    link_seconds: from one server to another, beside that. copy_gbs: of what came, checked and copied into the
    host pool. min_tokens, patience_seconds: as of the service's `[handover]`. host_blocks: the host tier of a
    server, where the machine has none. receive_blocks: of what came, until the requests that want it start.
    loses_at: when the first of the servers that prefill is lost; None for never.
    """

    link_gbs: float = 12.5
    link_seconds: float = 100e-6
    copy_gbs: float = 10.0
    min_tokens: int = 256
    patience_seconds: float = 10.0
    host_blocks: int = 4096
    receive_blocks: int = 4096
    loses_at: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for what could not be run."""
        for name in (
            "link_gbs",
            "copy_gbs",
            "patience_seconds",
            "min_tokens",
            "host_blocks",
            "receive_blocks",
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and above 0, not {getattr(self, name)}")
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{field.name} must be finite and at least 0, not {value}")

    def prefilling(self, machine: SimulatedMachine) -> SimulatedMachine:
        """The machine as one that prefills for others: behind its host tier stand those."""
        return self._with_peers(machine, 1)

    def decoding(self, machine: SimulatedMachine) -> SimulatedMachine:
        """The machine as one that has prompts computed: what came lies behind its host tier."""
        return self._with_peers(machine, self.receive_blocks)

    def _with_peers(self, machine: SimulatedMachine, num_behind: int) -> SimulatedMachine:
        cache = replace(
            self.with_host_tier(machine.cache), num_disk_cache_blocks=num_behind, saves_evictions=False
        )
        return replace(machine, cache=cache)

    def with_host_tier(self, cache: CacheOptions) -> CacheOptions:
        """The cache with the tier through which blocks pass."""
        if cache.num_host_cache_blocks:
            return cache
        return replace(
            cache,
            num_host_blocks=cache.num_host_blocks + self.host_blocks,
            num_host_cache_blocks=self.host_blocks,
        )


class Links:
    """The lines of a fleet's servers, each of which sends one block at a time and takes one in."""

    def __init__(self, seconds_a_block: float) -> None:
        self._seconds = seconds_a_block
        self._free_at: dict[int, float] = {}

    def send(self, source: int, target: int, now: float) -> float:
        """A block goes once both lines are free; when the last byte of it has left."""
        start = max(now, self._free_at.get(source, now), self._free_at.get(target, now))
        end = start + self._seconds
        self._free_at[source] = self._free_at[target] = end
        return end
