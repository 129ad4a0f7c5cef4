"""Ends a call whose client has left no room for one more message for too long."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from pageturner.service.errors import SlowConsumer

NUM_LOOKS = 4
"""As many looks in a row find a late write under way. Where this process gets no processor, or is stopped,
its clock goes on and its clients' room goes unnoticed: all that counts as one look."""


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
        self._is_writing = False
        self._num_looks = 0
        self._has_expired = False
        self._timer = self._loop.call_later(seconds / NUM_LOOKS, self._look)

    def write_begins(self) -> None:
        """To be followed by `write_ended`, unless the write raises."""
        self._is_writing = True
        self._num_looks = 0

    def write_ended(self) -> None:
        """The client's window had room for it."""
        self._is_writing = False

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
        """Cancel a write that NUM_LOOKS looks and the one before them, or its beginning, have seen."""
        if self._is_writing:
            self._num_looks += 1
        if self._is_writing and self._num_looks > NUM_LOOKS:
            self._has_expired = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(self._seconds / NUM_LOOKS, self._look)
