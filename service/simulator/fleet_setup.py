"""What a fleet consists of, and who sends to it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pageturner.service.routing.options import RouterOptions
from pageturner.service.simulator.handover import Handover


@dataclass(frozen=True, slots=True)
class FleetSetup:
    """The servers, and those who send to them.

    num_replicas: of all. num_prefill: of these, the last ones, which compute prompts for the others, to which
    alone requests are sent. handover: how. is_coarse: `coarse.CoarseReplica` in the place of the scheduler.
    num_routers: each knows what it sent itself, and of the rest what servers report. report_seconds: between
    two reports of one server; 0 for none, as where a lone router sees all. chunk_tokens: that a digest stands
    for. router: how each reckons.
    """

    num_replicas: int
    is_coarse: bool = False
    num_routers: int = 1
    report_seconds: float = 0.0
    chunk_tokens: int = 256
    router: RouterOptions = RouterOptions()
    num_prefill: int = 0
    handover: Handover = Handover()

    def __post_init__(self) -> None:
        """Raises ValueError for what could not be run."""
        for name in ("num_replicas", "num_routers", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.num_prefill < self.num_replicas:
            reason = f"must be at least 0 and below num_replicas, not {self.num_prefill}"
            raise ValueError(f"num_prefill {reason}")
        if self.num_prefill and self.is_coarse:
            raise ValueError("num_prefill: coarse servers hand nothing over")
        if not 0 <= self.report_seconds < math.inf:
            raise ValueError(f"report_seconds must be finite and at least 0, not {self.report_seconds}")
