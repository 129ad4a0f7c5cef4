"""What a replica tells the request routers of itself, as plain values that go through Ray's controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from pageturner.service.core.prefix_summary import PrefixSummary
from pageturner.service.core.stats import SchedulerStats


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """num_queued_tokens: of prompts that it has yet to compute. num_requests: running or waiting there.

    cache_tokens: that its prefix cache holds at most, on the device and in what the host tier has taken in
    so far; 0 before the first report. seen: of each router the number of the last request that is
    counted here. revision, block_size, key_id, fingerprints, is_truncated: the summary of its prefix cache.
    """

    num_queued_tokens: int = 0
    num_requests: int = 0
    cache_tokens: int = 0
    seen: Mapping[str, int] = field(default_factory=dict)
    revision: int = 0
    block_size: int = 1
    key_id: str = ""
    fingerprints: bytes = b""
    is_truncated: bool = False

    @classmethod
    def of(cls, stats: SchedulerStats, summary: PrefixSummary, seen: Mapping[str, int]) -> Self:
        """Of one moment."""
        return cls(
            stats.num_queued_prompt_tokens,
            stats.num_running + stats.num_waiting + stats.num_swapped,
            (stats.num_blocks + stats.num_host_blocks_cached) * summary.block_size,
            dict(seen),
            summary.revision,
            summary.block_size,
            summary.key_id,
            summary.fingerprints,
            summary.is_truncated,
        )

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Self:
        """What a replica has told; of one that has told nothing yet, that it is idle and holds nothing.

        What it tells beside, as one of a later version may, is passed over: while an application is brought
        up to date, replicas of both are there.
        """
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def to_plain(self) -> dict[str, Any]:
        """For `record_routing_stats`."""
        return asdict(self)

    @property
    def summary(self) -> PrefixSummary:
        """Of its prefix cache."""
        return PrefixSummary(
            self.revision, self.block_size, self.key_id, self.fingerprints, self.is_truncated
        )
