"""Servers of a tiny model in one process, of which one prefills for another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pageturner.policies.views import Rates
from pageturner.service.client import Client, Completion
from pageturner.service.config import cache_directory, load_config
from pageturner.service.core.clock import MonotonicClock
from pageturner.service.engine.async_engine import AsyncEngine
from pageturner.service.engine.metrics import Metrics
from pageturner.service.startup import handover, loading
from pageturner.service.startup.wiring import build_service
from support.scripted import recording_logger
from support.serving import serving


@dataclass(frozen=True, slots=True)
class TinyServer:
    """log: entries that it has written."""

    engine: AsyncEngine
    client: Client
    target: str
    log: list[MutableMapping[str, Any]]

    async def answer(self, prompt: tuple[int, ...], **options: Any) -> Completion:
        """Greedy, of 6 tokens."""
        return await self.client.generate(prompt, max_tokens=6, temperature=0.0, ignore_eos=True, **options)

    def logged(self, event: str) -> list[MutableMapping[str, Any]]:
        """The entries of this event."""
        return [entry for entry in self.log if entry["event"] == event]


def dear_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of a model whose tokens take longer to compute than to copy, unlike those of a tiny one."""
    monkeypatch.setattr(loading, "measure_rates", lambda target: replace(Rates(), block_bytes=1))
    monkeypatch.setattr(handover, "measure_copies", lambda *arguments: 1e12)


@asynccontextmanager
async def tiny_server(
    folder: Path, guard: Mapping[str, Any] | None = None, **given: Any
) -> AsyncIterator[TinyServer]:
    """given: keys of the configuration, with `__` for a dot. guard: what `serving` takes of certificates and
    identities."""
    keys = {
        "model.source": str(folder),
        "model.device": "cpu",
        "model.num_threads": 1,
        "cache.num_blocks": 64,
        "cache.swap_space": 0,
        "cache.host_cache_memory": "4MiB",
        "handover.min_tokens": 16,
        **{name.replace("__", "."): value for name, value in given.items()},
    }
    logger, entries = recording_logger()
    loaded, clock = load_config(None, given=keys, environ={}), MonotonicClock()
    engine = await asyncio.to_thread(
        build_service, loaded, cache_directory(), clock, clock.now(), logger, Metrics()
    )
    await engine.start()
    try:
        async with serving(engine, **(guard or {})) as served:
            yield TinyServer(engine, served.client, f"127.0.0.1:{served.port}", entries)
    finally:
        await engine.aclose()
