"""Ends a call whose client has left no room for one more message for too long."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from pageturner.service.errors import SlowConsumer


class WriteWatch:
    """Around the writes of one call, in its task; raises SlowConsumer where one took longer than `seconds`.

    One timer a call, which looks at the write under way when it fires: a timer a message would cost a tenth
    of what the message does.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None, "a call runs in a task"
        self._task = task
        self._num_cancels = task.cancelling()
        self._write_began_at: float | None = None
        self._has_expired = False
        self._timer = self._loop.call_later(seconds, self._look)

    def write_begins(self) -> None:
        """To be followed by `write_ended`, unless the write raises."""
        self._write_began_at = self._loop.time()

    def write_ended(self) -> None:
        """The client's window had room for it."""
        self._write_began_at = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if not self._has_expired or self._task.uncancel() > self._num_cancels:
            return  # nothing was late, or another has cancelled the task as well
        if kind is not None and issubclass(kind, asyncio.CancelledError):
            raise SlowConsumer(f"the stream was not read for {self._seconds:g} s") from None

    def _look(self) -> None:
        """Cancel a write that is late, else come back when the one under way, or the next, may be."""
        now = self._loop.time()
        began_at = now if self._write_began_at is None else self._write_began_at
        if now - began_at >= self._seconds:
            self._has_expired = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_at(began_at + self._seconds, self._look)
