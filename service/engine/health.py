"""Health that can be waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from structlog.typing import FilteringBoundLogger

from pageturner.service.engine.api import EngineHealth
from pageturner.service.errors import Draining, EngineDead, Loading

REASONS: Mapping[EngineHealth, str] = {
    EngineHealth.STARTING: "the engine is starting and takes no requests yet",
    EngineHealth.SERVING: "",
    EngineHealth.STALLED: "the engine makes no progress",
    EngineHealth.DRAINING: "the server is shutting down and takes no new requests",
    EngineHealth.DEAD: "the engine has failed; this server must be restarted",
}
"""Why a health takes no work, where nothing more is known."""
_REFUSALS = {
    EngineHealth.STARTING: Loading,
    EngineHealth.DRAINING: Draining,
    EngineHealth.DEAD: EngineDead,
}


class Health:
    """The engine's health, whose changes are logged. Lives on the event loop; DEAD is final."""

    def __init__(self, logger: FilteringBoundLogger) -> None:
        self._logger = logger
        self._value = EngineHealth.STARTING
        self._reason = REASONS[self._value]
        self._changed = asyncio.Event()

    @property
    def value(self) -> EngineHealth:
        return self._value

    @property
    def reason(self) -> str:
        """Why no work is taken, in a sentence; empty while it is."""
        return self._reason

    def become(self, value: EngineHealth, reason: str = "") -> bool:
        """Whether that is news. reason: more than the value says by itself."""
        if value is self._value or self._value is EngineHealth.DEAD:
            return False
        was, self._value, self._reason = self._value, value, reason or REASONS[value]
        self._logger.info("health", was=was.value, now=value.value, reason=self._reason)
        # Each change has an event of its own, so that it wakes those that waited and none after.
        self._changed.set()
        self._changed = asyncio.Event()
        return True

    async def wait_for_change(self, known: EngineHealth) -> EngineHealth:
        """The first value that is not `known`, which may be there already."""
        while self._value is known:
            await self._changed.wait()
        return self._value

    def refuse_unless_serving(self) -> None:
        """Raises EngineDead, Loading or Draining. What comes while the engine stalls is taken, and waits."""
        error = _REFUSALS.get(self._value)
        if error is not None:
            raise error(REASONS[self._value])
