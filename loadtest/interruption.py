"""A signal that ends a load test early: the figures of what ended so far are still told.

The first signal stops what runs and is noted; a second one ends the program at once. A signal that was
ignored when the program started, as `nohup` does with SIGHUP, stays ignored.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

Result = TypeVar("Result")

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """Whether and by what a run was ended early. number: of the signal, None while there was none."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._stop: Callable[[], object] = _nothing

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the signals of ENDING meanwhile. In the main thread only."""
        taken = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._note) for number in taken}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def stopping(self, stop: Callable[[], object]) -> Iterator[None]:
        """Call `stop` when a signal comes meanwhile, or now if one has come. It is called between any two
        instructions of the main thread, so it must do no more than wake what waits."""
        self._stop = stop
        try:
            if self.number is not None:
                stop()
            yield
        finally:
            self._stop = _nothing

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result | None:
        """`asyncio.run`, cancelled by a signal: None then."""
        try:
            return asyncio.run(self._cancellable(coroutine))
        except asyncio.CancelledError:
            if self.number is None:
                raise
            return None

    async def _cancellable(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        with self.stopping(lambda: loop.call_soon_threadsafe(task.cancel)):
            return await coroutine

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.number is not None:
            raise SystemExit(128 + number)
        self.number = number
        self._stop()


def _nothing() -> None:
    """What a signal stops where nothing runs."""
