"""How long device work takes: by events of the device, its cache filled with something else before."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any, Protocol

import torch

_WARM_UPS = 3
_SECONDS_EACH = 0.2
_LEAST_RUNS, _MOST_RUNS = 5, 50
_HEAD_START_CYCLES = 1_000_000
"""What the device idles before each run, half a millisecond, so that the host has enqueued all of the run by
then and its own slowness is not timed."""


class Stopwatch(Protocol):
    """How long a call takes on a device."""

    def median_seconds(self, call: Callable[[], object]) -> float:
        """The median of several runs, after some that do not count."""


class CudaStopwatch:
    """Medians over 5 to 50 runs.

    Before each run twice the L2 cache is *read*: the call then finds nothing of its own there, and no dirty
    lines either, whose way back to memory it would pay for. cuda: torch.cuda, or what stands for it.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        cache_bytes = cuda.get_device_properties(device).L2_cache_size
        self._other = torch.zeros(2 * cache_bytes // 4, dtype=torch.float32, device=device)

    def median_seconds(self, call: Callable[[], object]) -> float:
        """See the class."""
        for _ in range(_WARM_UPS):
            call()
        once = self._time(call, 1)[0]
        runs = min(_MOST_RUNS, max(_LEAST_RUNS, int(_SECONDS_EACH / max(once, 1e-6))))
        return median(self._time(call, runs))

    def _time(self, call: Callable[[], object], runs: int) -> list[float]:
        """Seconds of each run, all of them enqueued before the first is looked at."""
        moments = []
        for _ in range(runs):
            self._other.sum()
            # Private to torch, but the one way to let a stream wait without a kernel of one's own.
            self._cuda._sleep(_HEAD_START_CYCLES)
            start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            moments.append((start, end))
        self._cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in moments]
