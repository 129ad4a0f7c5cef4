"""`pageturner bench startup`: from the start of the process to health SERVING, the model converted before."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pageturner.service.client.server_process import running_server


@dataclass(frozen=True, slots=True)
class StartupResult:
    """Seconds of each run, and of the one before them that converted the model if need be."""

    first_seconds: float
    seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        """Of the runs that count."""
        return statistics.median(self.seconds)


def measure_startup(
    runs: int, arguments: Sequence[str] = (), on_start: Callable[[str], None] = lambda _: None
) -> StartupResult:
    """Start a server once for the caches, then `runs` times, one after the other; on_start: told of each."""

    def once() -> float:
        with running_server(arguments) as server:
            on_start(f"SERVING after {server.ready_seconds:.2f} s")
            return server.ready_seconds

    first = once()
    return StartupResult(first, tuple(once() for _ in range(runs)))
