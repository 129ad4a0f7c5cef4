"""Which generation calls are live, and how far a shutdown has come."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pageturner.service.errors import Draining, DuplicateRequest

DRAINING_TEXT = "the server is shutting down and takes no new requests"
ENDED_TEXT = "the server is shutting down; this request was not done in time"


class Lifecycle:
    """Open, then draining (no new generation call), then stopping (standing streams end).

    Holds the ids of live generation calls: whoever is admitted owns its id until it leaves, so that
    aborting by id in its clean-up can never meet somebody else's request.
    """

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        self.stopping = asyncio.Event()
        self._live: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def live_request_ids(self) -> tuple[str, ...]:
        return tuple(self._live)

    @contextmanager
    def admit(self, request_id: str) -> Iterator[None]:
        """Raises Draining or DuplicateRequest."""
        if self.draining.is_set():
            raise Draining(DRAINING_TEXT)
        if request_id in self._live:
            raise DuplicateRequest(request_id)
        self._live.add(request_id)
        self._idle.clear()
        try:
            yield
        finally:
            self._live.remove(request_id)
            if not self._live:
                self._idle.set()

    async def wait_idle(self, timeout_seconds: float) -> bool:
        """Whether the last live call left in time."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        except TimeoutError:
            return False
        return True
