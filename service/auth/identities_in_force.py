"""Which identities are in force: those of the file when it was last read without a fault."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from pageturner.service.auth.identities import Identities, read_identities
from pageturner.service.errors import ConfigError
from pageturner.service.watched_files import WatchedFiles, unheard, warn_of_readers


class IdentitiesInForce:
    """The identities of a file, which may be replaced while the service runs.

    A file with a fault is refused whole and logged; those in force stay. Calls under way keep the identity
    that they began with: a token that is revoked ends no stream, it begins none. Raises ConfigError at the
    first reading.
    """

    def __init__(
        self, path: Path, logger: FilteringBoundLogger, on_refused: Callable[[], object] = unheard
    ) -> None:
        self._on_refused = on_refused
        self._path = path
        self._logger = logger
        self._files = WatchedFiles(path)
        self._reading = asyncio.Lock()
        self._current = read_identities(path)
        self._report("authentication", "start")

    def current(self) -> Identities:
        """Those in force. To be asked once a call."""
        return self._current

    async def reload(self, origin: str) -> None:
        """Read the file now. origin: who asked, for the log."""
        async with self._reading:  # so that what is read last is what stays
            self._files.note()
            try:
                self._current = await asyncio.to_thread(read_identities, self._path)
            except ConfigError as error:
                self._logger.error("identities_refused", origin=origin, reason=str(error))
                self._on_refused()
                return
        self._report("identities_reloaded", origin)

    async def poll(self) -> None:
        """Reload if the file has changed since it was last read."""
        if self._files.have_changed():
            await self.reload(f"change of {self._path}")

    def _report(self, event: str, origin: str) -> None:
        current = self._current
        self._logger.info(
            event,
            origin=origin,
            tenants=current.num_tenants,
            tokens=len(current.tokens),
            certificates=len(current.certificates),
        )
        warn_of_readers("identities_readable", self._path, self._logger)
