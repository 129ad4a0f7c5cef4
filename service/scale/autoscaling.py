"""How many replicas there should be: as many as keep the tokens that wait below a bound at each.

Waiting tokens alone add replicas, since those that run take the time that they take. They alone would also
take replicas away that are busy with what waited before; so one goes only where those left have room.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

QUEUED_TOKENS = "queued_tokens"
BUSY = "busy"


@dataclass(frozen=True, slots=True)
class Demand:
    """Of one replica. queued_tokens: of prompts that wait there. busy: share of its sequences in use; above 1
    where requests wait."""

    queued_tokens: float
    busy: float


def wanted_replicas(
    demands: Iterable[Demand], current: int, target_queued_tokens: float, target_busy: float
) -> int:
    """How many are wanted in place of `current`; bounds and delays are the caller's. A replica that has told
    nothing yet counts as one without work."""
    told = tuple(demands)
    by_queue = math.ceil(sum(demand.queued_tokens for demand in told) / target_queued_tokens)
    by_work = math.ceil(sum(min(1.0, demand.busy) for demand in told) / target_busy)
    return max(1, by_queue, min(current, by_work))


class _Context(Protocol):
    """As much of Ray's AutoscalingContext as is looked at."""

    current_num_replicas: int
    target_num_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


class QueuedTokens:
    """Ray's autoscaling policy: made for a deployment by the class's path and these arguments."""

    def __init__(self, target_queued_tokens: float, target_busy: float) -> None:
        self._target_queued_tokens = target_queued_tokens
        self._target_busy = target_busy

    def __call__(self, context: _Context) -> tuple[int, dict[str, Any]]:
        """(replicas that are wanted, no state of its own). Ray applies bounds and delays."""
        metrics = context.aggregated_metrics or {}
        queued, busy = metrics.get(QUEUED_TOKENS, {}), metrics.get(BUSY, {})
        demands = [Demand(queued.get(replica, 0.0), busy.get(replica, 0.0)) for replica in {*queued, *busy}]
        wanted = wanted_replicas(
            demands, context.target_num_replicas, self._target_queued_tokens, self._target_busy
        )
        return wanted, {}
