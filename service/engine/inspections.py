"""Looks at the engine, shared by all that look: at most one is under way, and one is good for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pageturner.service.core.clock import Clock
from pageturner.service.core.inspection import SchedulerInspection
from pageturner.service.engine.api import Inspection
from pageturner.service.engine.thread_messages import Inspect, Inspected

FRESH_SECONDS = 0.25
"""An inspection no older than this is handed out again: however many look, the engine is asked as often."""

PATIENCE_SECONDS = 0.5
"""How long a look waits for the step under way to end; then it gets the last one, which tells its age."""


class Inspections:
    """Lives on the event loop. ask: leaves the engine thread a command. None is there before the first."""

    def __init__(
        self,
        clock: Clock,
        ask: Callable[[Inspect], None],
        *,
        num_blocks: int,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._clock = clock
        self._ask = ask
        self._patience_seconds = patience_seconds
        # Before its first step an engine has no request, and all of its blocks are free.
        empty = SchedulerInspection(num_blocks=num_blocks, free=tuple(range(num_blocks)))
        self._last = Inspected(empty, clock.now())
        self._is_first = True
        self._answered: asyncio.Event | None = None
        self._has_ended = False

    async def look(self) -> Inspection:
        """The newest, made anew if it is no longer fresh."""
        if self._answered is None and not self._has_ended and self._is_stale():
            self._answered = asyncio.Event()
            self._ask(Inspect())
        if self._answered is not None:
            try:
                async with asyncio.timeout(self._patience_seconds):
                    await self._answered.wait()
            except TimeoutError:
                pass  # the age of the last one tells so
        return Inspection(self._last.scheduler, max(0.0, self._clock.now() - self._last.taken_at))

    def deliver(self, answer: Inspected) -> None:
        """The engine thread's answer."""
        self._last, self._is_first = answer, False
        self._wake()

    def end(self) -> None:
        """The engine is dead: no request lives, and it answers no more."""
        self._last, self._has_ended = Inspected(SchedulerInspection(), self._clock.now()), True
        self._wake()

    def _is_stale(self) -> bool:
        return self._is_first or self._clock.now() - self._last.taken_at > FRESH_SECONDS

    def _wake(self) -> None:
        if self._answered is not None:
            self._answered.set()
            self._answered = None
