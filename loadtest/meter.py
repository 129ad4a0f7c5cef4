"""What the load test itself costs: a client that is the bottleneck measures itself, not the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pageturner.loadtest.statistics import percentile

_TICK_SECONDS = 0.05
BUSY_SHARE = 0.8
"""Of a core: a client process that takes more cannot be trusted to be on time."""

LATE_SECONDS = 0.02
"""An event loop that is so late at its 99th percentile measures itself."""


@dataclass(frozen=True, slots=True)
class ClientCost:
    """Of one client process while it sent. cpu_seconds: of all its threads. loop_lags: seconds by which its
    event loop was late, sampled 20 times a second."""

    wall_seconds: float
    cpu_seconds: float
    loop_lags: tuple[float, ...]

    @property
    def cpu_share(self) -> float:
        """Of one core."""
        return self.cpu_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0

    @property
    def loop_lag_p99(self) -> float:
        """Seconds; 0 for a run too short to have a sample."""
        return percentile(sorted(self.loop_lags), 0.99) if self.loop_lags else 0.0


def warning(costs: Sequence[ClientCost]) -> str:
    """What to say where the client may be what limits the figures; empty where it is not."""
    busiest = max((cost.cpu_share for cost in costs), default=0.0)
    lag = max((cost.loop_lag_p99 for cost in costs), default=0.0)
    if busiest > BUSY_SHARE:
        return (
            f"the client may be the bottleneck: its busiest process took {busiest:.0%} of a core; "
            f"try --processes {len(costs) + 1}"
        )
    if lag > LATE_SECONDS:
        return (
            f"the client may be the bottleneck: its event loop was {1e3 * lag:.0f} ms late at p99 "
            f"with {busiest:.0%} of a core; its machine is too busy"
        )
    return ""


class CostMeter:
    """Measures one process between entering and leaving `running`."""

    def __init__(
        self,
        wall: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.process_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._wall, self._cpu, self._sleep = wall, cpu, sleep
        self._lags: list[float] = []
        self._began = self._ended = (0.0, 0.0)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Count from here to the end of the block."""
        self._began = self._ended = (self._wall(), self._cpu())
        sampling = asyncio.create_task(self._sample())
        try:
            yield
        finally:
            sampling.cancel()
            self._ended = (self._wall(), self._cpu())

    async def _sample(self) -> None:
        while True:
            due = self._wall() + _TICK_SECONDS
            await self._sleep(_TICK_SECONDS)
            self._lags.append(max(0.0, self._wall() - due))

    @property
    def cost(self) -> ClientCost:
        """Of what ran last."""
        (wall, cpu), (wall_end, cpu_end) = self._began, self._ended
        return ClientCost(wall_end - wall, cpu_end - cpu, tuple(self._lags))
