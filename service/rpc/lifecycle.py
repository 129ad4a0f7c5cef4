"""How far the server has come: loading, then serving an engine, then stopping."""

from __future__ import annotations

import asyncio

from pageturner.service.engine.api import Condition, EngineClient, EngineHealth
from pageturner.service.errors import Loading

STOPPING_TEXT = "the server is shutting down"
LOADING_TEXT = "the model is loading: the server takes no requests yet"


class Lifecycle:
    """Loading until an engine is attached; from `stopping` on, standing streams end.

    Everything else about a request's life is the engine's: its id, its end, and the drain.
    """

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self._attached = asyncio.Event()
        self._engine: EngineClient | None = None

    def attach(self, engine: EngineClient) -> None:
        """Serve this engine from now on."""
        assert self._engine is None, "a server serves one engine"
        self._engine = engine
        self._attached.set()

    @property
    def is_loading(self) -> bool:
        """Whether no engine is there yet."""
        return self._engine is None

    @property
    def engine(self) -> EngineClient:
        """Raises Loading while there is none."""
        if self._engine is None:
            raise Loading(LOADING_TEXT)
        return self._engine

    @property
    def health(self) -> EngineHealth:
        """The engine's health, or that it is loading."""
        return EngineHealth.STARTING if self._engine is None else self._engine.health

    @property
    def condition(self) -> Condition:
        """The engine's condition, or that the model is loading."""
        if self._engine is None:
            return Condition(EngineHealth.STARTING, LOADING_TEXT)
        return self._engine.condition

    async def wait_for_health_change(self, known: EngineHealth) -> EngineHealth:
        """The first health that is not `known`, which may be there already."""
        if self.health is not known:
            return self.health
        await self._attached.wait()
        return await self.engine.wait_for_health_change(known)
