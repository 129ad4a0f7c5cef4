"""Clocks for benchmarks: one that is told the time, and torch.cuda's events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch


class ToldTime:
    """Every call is run once and took `seconds`."""

    def __init__(self, seconds: float = 1e-3) -> None:
        self.seconds = seconds
        self.num_calls = 0

    def median_seconds(self, call: Callable[[], object]) -> float:
        self.num_calls += 1
        call()
        return self.seconds


@dataclass
class FakeCuda:
    """torch.cuda for the stopwatch: each event is a tick later than the one before."""

    log: list[str] = field(default_factory=list)
    ticks: int = 0

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(L2_cache_size=4096)

    def get_device_name(self, device: torch.device) -> str:
        return "Fake 9000"

    def get_device_capability(self, device: torch.device) -> tuple[int, int]:
        return (9, 0)

    def empty_cache(self) -> None:
        self.log.append("empty")

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return (1 << 30, 1 << 31)

    def _sleep(self, cycles: int) -> None:
        self.log.append("sleep")

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def Event(self, *, enable_timing: bool) -> FakeEvent:  # noqa: N802 - torch's name
        assert enable_timing
        return FakeEvent(self)


@dataclass
class FakeEvent:
    cuda: FakeCuda
    tick: int = -1

    def record(self) -> None:
        self.cuda.ticks += 1
        self.tick = self.cuda.ticks
        self.cuda.log.append("event")

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.cuda.log[-1] == "synchronize"
        return float(end.tick - self.tick)
