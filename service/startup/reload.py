"""The configuration read again while the service runs: its policies come into force, the rest waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from structlog.typing import FilteringBoundLogger

from pageturner.policies import registry
from pageturner.policies.spec import PolicySpec
from pageturner.service.config import LoadedConfig, PoliciesConfig
from pageturner.service.engine.api import EngineClient, PolicyChange
from pageturner.service.errors import PageturnerError
from pageturner.service.policy_host.reports import PoliciesInfo
from pageturner.service.watched_files import WatchedFiles, unheard

POLL_SECONDS = 2.0
"""How often the file is looked at: a glance at its time and size."""


class Reloadable(Protocol):
    """Something made of files, to be made anew when they change."""

    async def reload(self, origin: str) -> None:
        """Read them now. origin: who asked, for the log, which is told of faults: nothing is raised."""
        ...

    async def poll(self) -> None:
        """Reload if they have changed."""
        ...


async def watch(
    parts: Sequence[Reloadable], sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
) -> None:
    """Poll without end."""
    while True:
        await sleep(POLL_SECONDS)
        for part in parts:
            await part.poll()


class ConfigReloader:
    """Puts the policies of the configuration in force, whatever was set by other ways meanwhile.

    load: reads file, environment and flags once more. loaded: what the service was built from. A
    configuration that is wrong, or asks for impossible policies, is refused whole and logged; changes
    outside of [policies] are logged as waiting for a restart. The service goes on in any case.
    """

    def __init__(
        self,
        engine: EngineClient,
        load: Callable[[], LoadedConfig],
        loaded: LoadedConfig,
        logger: FilteringBoundLogger,
        on_refused: Callable[[], object] = unheard,
    ) -> None:
        self._on_refused = on_refused
        self._engine = engine
        self._load = load
        self._loaded = loaded
        self._logger = logger
        self._files = WatchedFiles(*filter(None, [loaded.path]))

    async def reload(self, origin: str) -> None:
        """Read and obey the configuration now. origin: who asked, for the log."""
        self._files.note()
        try:
            loaded = await asyncio.to_thread(self._load)
            change = change_to(loaded.config.policies, self._engine.policies(), origin)
            if change.policies or change.shadows:
                await self._engine.set_policies(change)
        except PageturnerError as error:
            self._logger.error("reload_refused", origin=origin, reason=str(error))
            self._on_refused()
            return
        was, now = self._loaded.config.flat(), loaded.config.flat()
        waiting = [key for key in now if now[key] != was[key] and not key.startswith("policies.")]
        if waiting:
            self._logger.warning("restart_needed", origin=origin, keys=waiting)
        self._logger.info("reloaded", origin=origin, axes=sorted(change.policies))

    async def poll(self) -> None:
        """Reload if the file has changed since it was last read."""
        if self._files.have_changed():
            await self.reload(f"change of {self._loaded.path}")


def change_to(config: PoliciesConfig, in_force: PoliciesInfo, origin: str) -> PolicyChange:
    """What must change so that this configuration is in force. Raises ConfigError.

    An axis in quarantine changes too: a reload tries its policy again.
    """
    wanted, shadows = config.create(), config.create_shadows()
    policies: dict[str, PolicySpec] = {}
    watched: dict[str, PolicySpec | None] = {}
    for info in in_force.axes:
        spec = registry.spec_of(getattr(wanted, info.axis))
        if info.is_quarantined or spec != PolicySpec(info.name, info.options):
            policies[info.axis] = spec
        shadow = None if info.axis not in shadows else registry.spec_of(shadows[info.axis])
        if shadow != (None if info.shadow is None else PolicySpec(info.shadow.name, info.shadow.options)):
            watched[info.axis] = shadow
    return PolicyChange(policies, watched, origin=origin)
