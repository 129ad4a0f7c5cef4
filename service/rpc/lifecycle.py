"""How far the server has come: loading, then serving an engine, then stopping."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from pageturner.service.engine.api import Condition, EngineClient, EngineHealth
from pageturner.service.errors import Loading

STOPPING_TEXT = "the server is shutting down"
LEAVING_TEXT = "the server is shutting down and takes no new requests"
LOADING_TEXT = "the model is loading: the server takes no requests yet"

_WORKING = (EngineHealth.SERVING, EngineHealth.STALLED)


class Lifecycle:
    """Loading until an engine is attached; from `stopping` on, standing streams end.

    Everything else about a request's life is the engine's: its id, its end, and the drain.
    """

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self._attached = asyncio.Event()
        self._leaving = asyncio.Event()
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

    def leave(self) -> None:
        """Health says from now on that work goes elsewhere, though what is on its way is still taken."""
        self._leaving.set()

    @property
    def health(self) -> EngineHealth:
        """The engine's health; that it is loading; or that the server drains."""
        health = EngineHealth.STARTING if self._engine is None else self._engine.health
        return EngineHealth.DRAINING if self._leaving.is_set() and health in _WORKING else health

    @property
    def condition(self) -> Condition:
        """The same with its reason."""
        if self._engine is None:
            return Condition(EngineHealth.STARTING, LOADING_TEXT)
        condition, health = self._engine.condition, self.health
        if condition.health is health:
            return condition
        return replace(condition, health=health, reason=LEAVING_TEXT)

    async def wait_for_health_change(self, known: EngineHealth) -> EngineHealth:
        """The first health that is not `known`, which may be there already."""
        while self.health is known:
            engine = self._engine
            change = self._attached.wait() if engine is None else engine.wait_for_health_change(engine.health)
            await wait_for_first(change, *(() if self._leaving.is_set() else (self._leaving.wait(),)))
        return self.health


async def wait_for_first(*awaitables: Coroutine[Any, Any, object]) -> None:
    """Return when one of them is done, the others cancelled. Raises what it raised."""
    waits = {asyncio.ensure_future(awaitable) for awaitable in awaitables}
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in done:
            wait.result()
    finally:
        for wait in waits:
            wait.cancel()
