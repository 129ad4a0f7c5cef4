"""Between two steps: what the disk has done is told to the scheduler, what that wants next to the disk.

Where another server stands in the disk's place, it is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from structlog.typing import FilteringBoundLogger

from pageturner.service.core.outputs import SchedulerOutput
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.engine.lower_tier import CachedBlock, LowerTier, Ready

FLUSH_SECONDS = 10.0
"""How long the end of a server may write what only its memory holds."""


class TierExchange:
    """Bound to the engine's thread.

    ready: gives a wait for all that the device has enqueued by then over blocks of the host. cached: the
    blocks that memory holds, those first that are worth the most to the next process.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        disk: LowerTier,
        ready: Callable[[], Ready],
        cached: Callable[[], Iterable[CachedBlock]],
        logger: FilteringBoundLogger,
    ) -> None:
        self._scheduler = scheduler
        self._disk = disk
        self._ready = ready
        self._cached = cached
        self._logger = logger

    def schedule(self, now: float) -> SchedulerOutput:
        """The scheduler's, told of the transfers that have ended; those that it wants are begun."""
        ended = self._disk.take_ended()
        if ended:
            self._scheduler.end_transfers(ended, now)
        output = self._scheduler.schedule(now)
        transfers = self._scheduler.take_transfers()
        if transfers:
            self._disk.start(transfers, self._ready())
        return output

    @property
    def is_fetching(self) -> bool:
        """Whether a request waits for the disk."""
        return bool(self._scheduler.state.fetching)

    @property
    def is_busy(self) -> bool:
        """Whether the scheduler is to be asked again soon, though nothing runs."""
        tiers = self._scheduler.manager.tiers
        return self._disk.is_busy or (tiers is not None and tiers.is_busy)

    @property
    def is_handing_over(self) -> bool:
        """Whether another server waits for blocks: it is to be asked again at once."""
        tiers = self._scheduler.manager.tiers
        return tiers is not None and tiers.is_handing_over

    def close(self, *, is_sound: bool) -> None:
        """The last call: blocks that only memory holds are written, if what it holds is sound."""
        num_written = self._disk.close(self._cached() if is_sound else (), FLUSH_SECONDS)
        self._logger.info("disk_cache_closed", num_blocks=self._disk.num_blocks, num_flushed=num_written)
