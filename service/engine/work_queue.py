"""Work beside the event loop: few pieces at once, in an order that is fair by size, bounded in what waits."""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from pageturner.service.errors import PageturnerError, QueueFull

_T = TypeVar("_T")


class WorkQueue:
    """Runs functions in threads, at most `num_threads` at once. Lives on the event loop.

    A piece of work is overtaken by later and smaller ones that together are about as large as it is: small
    ones do not wait behind many large ones, and a large one is not starved. Its caller may be cancelled at
    any time: what waits is dropped, what runs keeps its thread until it returns.

    Sizes are in any one unit. max_waiting: of all that waits. The threads are daemons that end with their
    work: the end of the process waits for none.
    """

    def __init__(self, name: str, *, num_threads: int, max_waiting: int) -> None:
        self._name = name
        self._num_free = num_threads
        self._max_waiting = max_waiting
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._size_waiting = 0
        self._size_started = 0
        self._num_queued = 0

    async def run(self, size: int, work: Callable[[], _T]) -> _T:
        """What `work` returns or raises. Raises QueueFull, or the error of `fail_waiting`."""
        await self._take_thread(size)
        self._size_started += size
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_T] = loop.create_future()

        def settle(result: _T | None, error: BaseException | None) -> None:
            self._free_thread()
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type] # no error, hence a result

        def run() -> None:
            result, error = None, None
            try:
                result = work()
            except BaseException as fault:  # whatever it is, the caller gets it
                error = fault
            with suppress(RuntimeError):  # the loop was closed meanwhile: no caller is left
                loop.call_soon_threadsafe(settle, result, error)

        try:
            threading.Thread(target=run, name=self._name, daemon=True).start()
        except RuntimeError:  # the system has no more threads
            self._free_thread()
            raise
        return await done

    def fail_waiting(self, error: PageturnerError) -> None:
        """End the wait of everything that has no thread yet."""
        waiting, self._waiting = self._waiting, []
        for _, _, turn in waiting:
            if not turn.done():
                turn.set_exception(error)

    async def _take_thread(self, size: int) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        if self._size_waiting and self._size_waiting + size > self._max_waiting:
            raise QueueFull(f"{self._size_waiting} characters of prompts wait to be tokenized", 1.0)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Start-time order, counted in work instead of seconds.
        self._num_queued += 1
        heapq.heappush(self._waiting, (self._size_started + size, self._num_queued, turn))
        self._size_waiting += size
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._free_thread()  # given a thread and cancelled at once
            raise
        finally:
            self._size_waiting -= size

    def _free_thread(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
