"""How full a server's pools were in the course of a run, in a bounded number of samples."""

from __future__ import annotations

from dataclasses import dataclass

from pageturner.service.core.outputs import SchedulerStats

MAX_SAMPLES = 256
FIRST_SAMPLE_INTERVAL = 8
"""Steps between two samples, which cost time a block. When a run has MAX_SAMPLES, every other one goes
and they get twice as rare."""


@dataclass(frozen=True, slots=True)
class PoolSample:
    """The pools at one moment."""

    at: float
    num_waiting: int
    num_running: int
    used_share: float
    wasted_share: float
    host_share: float


class PoolSamples:
    """taken: by time. block_size: tokens of a block."""

    def __init__(self, block_size: int) -> None:
        self.taken: list[PoolSample] = []
        self._block_size = block_size
        self._interval = FIRST_SAMPLE_INTERVAL
        self._num_steps = 0

    def is_due(self) -> bool:
        """A step has ended: whether a sample is to be taken."""
        self._num_steps += 1
        return self._num_steps % self._interval == 0

    def take(self, stats: SchedulerStats, now: float) -> None:
        """Note how full the pools are."""
        num_slots = max(1, stats.num_blocks_used * self._block_size)
        self.taken.append(
            PoolSample(
                at=now,
                num_waiting=stats.num_waiting,
                num_running=stats.num_running,
                used_share=stats.num_blocks_used / stats.num_blocks,
                wasted_share=stats.num_wasted_slots / num_slots,
                host_share=stats.num_host_blocks_used / max(1, stats.num_host_blocks),
            )
        )
        if len(self.taken) >= MAX_SAMPLES:
            self.taken = self.taken[::2]
            self._interval *= 2
