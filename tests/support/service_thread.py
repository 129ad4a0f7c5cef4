"""A real service in a thread of its own, for callers that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from support.real_service import RealService
from support.serving import Served

T = TypeVar("T")
S = TypeVar("S", RealService, Served)


@dataclass(frozen=True, slots=True)
class InThread(Generic[S]):
    """service: touched on its own loop alone, through `run`."""

    service: S
    loop: asyncio.AbstractEventLoop

    def run(self, work: Callable[[S], Coroutine[None, None, T]]) -> T:
        """What it returns or raises, in the service's loop."""
        return asyncio.run_coroutine_threadsafe(work(self.service), self.loop).result()


@contextmanager
def in_thread(make: Callable[[], AbstractAsyncContextManager[S]]) -> Iterator[InThread[S]]:
    """Ready on entry, closed on leaving, when what closing raised is raised."""
    ready: Future[InThread[S]] = Future()
    ended: Future[None] = Future()
    leave = asyncio.Event()

    async def live() -> None:
        async with make() as service:
            ready.set_result(InThread(service, asyncio.get_running_loop()))
            await leave.wait()

    def run() -> None:
        try:
            asyncio.run(live())
        except BaseException as error:  # handed to the thread that waits
            if not ready.done():
                ready.set_exception(error)
            ended.set_exception(error)
        else:
            ended.set_result(None)

    thread = threading.Thread(target=run, name="service")
    thread.start()
    held = ready.result()
    try:
        yield held
    finally:
        held.loop.call_soon_threadsafe(leave.set)
        thread.join()
        ended.result()
