"""What a fleet's run comes to, before figures are made of it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from pageturner.service.simulator.handing_over import HandoverCounts
from pageturner.service.simulator.workload import WorkloadRequest


class RequestTable:
    """What became of each request, by its index. Times are virtual seconds, NaN where it did not happen."""

    def __init__(self, size: int) -> None:
        self.arrived_at = array("d", [math.nan]) * size
        self.first_at = array("d", [math.nan]) * size
        self.ended_at = array("d", [math.nan]) * size
        self.num_output = array("q", [0]) * size
        self.num_cached = array("q", [0]) * size
        self.replica = array("q", [-1]) * size
        self.has_failed = bytearray(size)

    def __len__(self) -> int:
        return len(self.arrived_at)


@dataclass(frozen=True, slots=True)
class FleetResult:
    """A whole run. num_scheduled_tokens, num_preemptions: by replica. num_faults: bad answers of the routing
    policy. gaps: seconds between two tokens of an answer, sorted; none where servers are coarse.
    num_handed_tokens: of prompts, that came from servers that prefill; num_hit_tokens: that these had cached.
    handovers: what became of them.
    """

    requests: Sequence[WorkloadRequest]
    table: RequestTable
    seconds: float
    num_scheduled_tokens: tuple[int, ...]
    num_preemptions: tuple[int, ...]
    num_faults: int
    gaps: array[float]
    num_handed_tokens: int = 0
    num_hit_tokens: int = 0
    handovers: HandoverCounts = field(default_factory=HandoverCounts)
