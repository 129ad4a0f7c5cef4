"""Harnesses whose scheduler is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pageturner.policies.views import LoadView, RequestView, VictimView
from pageturner.service.flight.recorder import FlightRecorder
from pageturner.service.flight.records import FlightRecord, Setting
from support.core_harness import CoreHarness


@dataclass(frozen=True, slots=True)
class ThrowingVictim:
    """Always raises; named "support.flight:ThrowingVictim"."""

    def rank(self, candidates: Sequence[VictimView], claimant: RequestView, load: LoadView) -> list[str]:
        raise RuntimeError("on purpose")


def recorded(harness: CoreHarness, num_steps: int = 1 << 16) -> FlightRecorder:
    """Record a harness from now on."""
    scheduler = harness.scheduler
    device, host = scheduler.manager.device, scheduler.manager.host
    setting = Setting(
        "test", harness.options, harness.cache, scheduler.state.rates, harness.depth, harness.speculation
    )
    assert (device.num_blocks, host.num_blocks) == (harness.cache.num_blocks, harness.cache.num_host_blocks)
    return FlightRecorder(scheduler, setting, num_steps)


def record_of(harness: CoreHarness) -> FlightRecord:
    """What the recorder that began last has kept."""
    recorder = harness.scheduler.listeners[-1]
    assert isinstance(recorder, FlightRecorder)
    return recorder.record("test")
