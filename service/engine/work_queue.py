"""Work beside the event loop: few pieces at once, in an order that is fair by size and leaves room for all
tenants, bounded in what waits."""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from pageturner.service.engine.tenants import QUEUE_WEIGHT
from pageturner.service.errors import PageturnerError, QueueFull

_T = TypeVar("_T")

_Turn = tuple[int, int, asyncio.Future[None]]
"""Its place in the order, its number, and what is done when it has a thread."""


class WorkQueue:
    """Runs functions in threads, at most `num_threads` at once. Lives on the event loop.

    A piece of work is overtaken by later and smaller ones that together are about as large as it is: small
    ones do not wait behind many large ones, and a large one is not starved. Its caller may be cancelled at
    any time: what waits is dropped, what runs keeps its thread until it returns.

    Work has an owner, or "" for whoever cannot be told apart. One owner leaves a thread to the others, and
    fills four fifths of what may wait at most (see `tenants.QUEUE_WEIGHT`): so large work of one holds up
    that of others by what is in the other threads alone.

    Sizes are in any one unit. max_waiting: of all that waits. The threads are daemons that end with their
    work: the end of the process waits for none.
    """

    def __init__(self, name: str, *, num_threads: int, max_waiting: int) -> None:
        self._name = name
        self._num_threads = self._num_free = num_threads
        self._max_waiting = max_waiting
        self._waiting: dict[str, list[_Turn]] = {}
        self._size_waiting = 0
        self._size_waiting_of: Counter[str] = Counter()
        self._num_running_of: Counter[str] = Counter()
        self._size_started = 0
        self._num_queued = 0

    async def run(self, size: int, work: Callable[[], _T], owner: str = "") -> _T:
        """What `work` returns or raises. Raises QueueFull, or the error of `fail_waiting`."""
        await self._take_thread(size, owner)
        self._size_started += size
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_T] = loop.create_future()

        def settle(result: _T | None, error: BaseException | None) -> None:
            self._free_thread(owner)
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
            self._free_thread(owner)
            raise
        return await done

    def fail_waiting(self, error: PageturnerError) -> None:
        """End the wait of everything that has no thread yet."""
        waiting, self._waiting = self._waiting, {}
        for turns in waiting.values():
            for _, _, turn in turns:
                if not turn.done():
                    turn.set_exception(error)

    async def _take_thread(self, size: int, owner: str) -> None:
        if self._num_free and self._may_run(owner):
            self._start(owner)
            return
        self._check_room(size, owner)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Start-time order, counted in work instead of seconds.
        self._num_queued += 1
        entry = (self._size_started + size, self._num_queued, turn)
        heapq.heappush(self._waiting.setdefault(owner, []), entry)
        self._add_waiting(size, owner)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._free_thread(owner)  # given a thread and cancelled at once
            raise
        finally:
            self._add_waiting(-size, owner)

    def _may_run(self, owner: str) -> bool:
        return not owner or self._num_running_of[owner] < max(1, self._num_threads - 1)

    def _check_room(self, size: int, owner: str) -> None:
        room = self._max_waiting - self._size_waiting
        own = self._size_waiting_of[owner] if owner else 0
        if (self._size_waiting and size > room) or (own and own + size > QUEUE_WEIGHT * room):
            raise QueueFull(f"{self._size_waiting} characters of prompts wait to be tokenized", 1.0)

    def _add_waiting(self, size: int, owner: str) -> None:
        self._size_waiting += size
        self._size_waiting_of[owner] += size
        if not self._size_waiting_of[owner]:
            del self._size_waiting_of[owner]

    def _start(self, owner: str) -> None:
        self._num_free -= 1
        self._num_running_of[owner] += 1

    def _free_thread(self, owner: str) -> None:
        self._num_free += 1
        self._num_running_of[owner] -= 1
        if not self._num_running_of[owner]:
            del self._num_running_of[owner]
        while self._num_free and (found := self._next()) is not None:
            owner, turn = found
            self._start(owner)
            turn.set_result(None)

    def _next(self) -> tuple[str, asyncio.Future[None]] | None:
        """Whose turn it is, taken off what waits; None where nobody's."""
        for owner in list(self._waiting):
            turns = self._waiting[owner]
            while turns and turns[0][2].done():  # its caller has left
                heapq.heappop(turns)
            if not turns:
                del self._waiting[owner]
        ready = [owner for owner in self._waiting if self._may_run(owner)]
        if not ready:
            return None
        owner = min(ready, key=lambda each: self._waiting[each][0])
        return owner, heapq.heappop(self._waiting[owner])[2]
