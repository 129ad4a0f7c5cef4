"""Health that can be waited for."""

from __future__ import annotations

import asyncio

from pageturner.service.engine.api import EngineHealth
from pageturner.service.errors import Draining, EngineDead, Loading


class Health:
    """The engine's health. Lives on the event loop; DEAD is final."""

    def __init__(self) -> None:
        self._value = EngineHealth.STARTING
        self._changed = asyncio.Event()

    @property
    def value(self) -> EngineHealth:
        return self._value

    def become(self, value: EngineHealth) -> bool:
        """Whether that is news."""
        if value is self._value or self._value is EngineHealth.DEAD:
            return False
        self._value = value
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
        if self._value is EngineHealth.DEAD:
            raise EngineDead("the engine has failed; this server must be restarted")
        if self._value is EngineHealth.STARTING:
            raise Loading("the engine is starting and takes no requests yet")
        if self._value is EngineHealth.DRAINING:
            raise Draining("the server is shutting down and takes no new requests")
