"""What an engine says of itself to who asks: what runs, what was done. It reads and changes nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path

from pageturner.service.core.clock import Clock
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.engine.activity import activity_of
from pageturner.service.engine.adapter_reports import AdapterFigures, AdapterInfo
from pageturner.service.engine.adapters import Adapters
from pageturner.service.engine.api import Activity, Condition, EngineHealth, ModelInfo, RecentLoad, ServerInfo
from pageturner.service.engine.engine import Engine
from pageturner.service.engine.health import Health
from pageturner.service.errors import NotRecorded
from pageturner.service.flight.dumps import FlightDumps
from pageturner.service.policy_host.reports import PoliciesInfo


class EngineOverview(ABC):
    """The part of `AsyncEngine` that operators read. flight: None if nothing is recorded."""

    def __init__(
        self,
        engine: Engine,
        model: ModelInfo,
        server_info: ServerInfo,
        clock: Clock,
        flight: FlightDumps | None,
        health: Health,
        adapters: Adapters,
    ) -> None:
        self._engine = engine
        self._model = model
        self._server_info = server_info
        self._clock = clock
        self._flight = flight
        self._health = health
        self._adapters = adapters
        self._started_at = clock.now()

    @property
    def health(self) -> EngineHealth:
        """The engine's health at this moment."""
        return self._health.value

    async def wait_for_health_change(self, known: EngineHealth) -> EngineHealth:
        """Wait until health is other than `known`; that one."""
        return await self._health.wait_for_change(known)

    @property
    @abstractmethod
    def condition(self) -> Condition:
        """Health with its reason, of this moment."""

    @abstractmethod
    def load(self) -> SchedulerStats:
        """The scheduler's figures, with requests that are accepted and on their way to it."""

    def models(self) -> tuple[ModelInfo, ...]:
        """The one model that is served."""
        return (replace(self._model, adapters=self._adapters.names()),)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """Those that requests may name, then those that wait for the end of their last."""
        return self._adapters.report()

    @property
    def adapter_folder(self) -> Path | None:
        """Below which clients may name folders to load; None if they may name none."""
        return self._adapters.folder

    def adapter_figures(self) -> AdapterFigures:
        """How many there are, and what they take."""
        return self._adapters.figures()

    def server_info(self) -> ServerInfo:
        """What runs here, and for how long."""
        return replace(self._server_info, uptime_seconds=self._clock.now() - self._started_at)

    def policies(self) -> PoliciesInfo:
        """As of the last reading, save for the call under way, which is told as of now."""
        asking, info = self._engine.policies.asking, self._engine.policies.info
        if asking is None:
            return info
        axes = (
            replace(policy, asking_seconds=asking.seconds) if policy.axis == asking.axis else policy
            for policy in info.axes
        )
        return replace(info, axes=tuple(axes))

    def activity(self) -> Activity:
        """What was done since start."""
        uptime_seconds = self._clock.now() - self._started_at
        return activity_of(self.condition, uptime_seconds, self._engine.metrics.snapshot(self.load()))

    def recent_load(self) -> RecentLoad:
        """Rates of the last seconds."""
        return self._engine.metrics.recent(self._clock.now())

    async def flight_record(self) -> bytes:
        """A flight file of this moment. Raises NotRecorded where the recorder is off."""
        if self._flight is None:
            raise NotRecorded("the flight recorder is off: engine.flight_recorder_steps is 0")
        return await self._flight.content()
