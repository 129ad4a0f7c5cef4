"""Harnesses whose scheduler is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pageturner.policies.views import LoadView, RequestView, VictimView
from pageturner.service.flight.policy_notes import policy_specs
from pageturner.service.flight.recorded_scheduler import RecordedScheduler
from pageturner.service.flight.recorder import FlightRecorder
from pageturner.service.flight.records import FlightRecord, FlightStart, Setting
from support.core_harness import CoreHarness

NAME_KEY = b"names"


@dataclass(frozen=True, slots=True)
class ThrowingVictim:
    """Always raises; named "support.flight:ThrowingVictim"."""

    def rank(self, candidates: Sequence[VictimView], claimant: RequestView, load: LoadView) -> list[str]:
        raise RuntimeError("on purpose")


class OpenRecordedScheduler(RecordedScheduler):
    """Lets a harness see the scheduler behind it as well."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def recorded(harness: CoreHarness, num_steps: int = 1 << 16) -> FlightRecorder:
    """Record a harness from now on; it must be fresh."""
    scheduler = harness.scheduler
    device, host = scheduler.manager.device, scheduler.manager.host
    setting = Setting(
        "test",
        harness.options,
        harness.cache,
        scheduler.state.rates,
        harness.depth,
    )
    assert (device.num_blocks, host.num_blocks) == (harness.cache.num_blocks, harness.cache.num_host_blocks)
    recorder = FlightRecorder(setting, FlightStart(policy_specs(scheduler.policy_host.policies)), num_steps)
    harness.scheduler = OpenRecordedScheduler(scheduler, recorder, NAME_KEY)  # type: ignore[assignment]  # a test double
    return recorder


def record_of(harness: CoreHarness) -> FlightRecord:
    scheduler: Any = harness.scheduler
    record: FlightRecord = scheduler.recorder.record("test")
    return record
