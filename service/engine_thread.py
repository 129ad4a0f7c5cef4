"""An engine on a thread of its own, for callers that have no event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future
from queue import SimpleQueue
from typing import Any, TypeVar

from pageturner.service.client.values import Completion, CompletionBuilder
from pageturner.service.engine.api import GenerationRequest, StreamEvent
from pageturner.service.engine.async_engine import AsyncEngine
from pageturner.service.errors import Draining, QueueFull
from pageturner.service.rpc.events import opened

Progress = Callable[[int, int], object]
"""Called with the number of prompts that are done and of all, in the thread that asked for the answers."""

_CLOSED = "this LLM is closed"
_T = TypeVar("_T")


class EngineThread:
    """Starts the engine, and ends it on `close`. Every method is for any thread but its own.

    Interrupting a caller, as Ctrl-C does, aborts what it waits for. Once closed, methods raise Draining.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._ended = asyncio.Event()
        self._room = _Room()
        self._is_closed = False
        self._lock = threading.Lock()  # nothing is sent to the loop once it was told to end
        started: Future[asyncio.AbstractEventLoop] = Future()
        # A daemon: a program that ends without closing must end.
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._live(started)), name="pageturner-llm", daemon=True
        )
        self._thread.start()
        self._loop = started.result()

    def close(self) -> None:
        """End what runs, then the threads. Closing twice is no error."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._ended.set)
        # The garbage collector may call this on the engine's own thread, which cannot wait for itself.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """What the coroutine returns or raises, on the engine's event loop."""
        future = self._send(coroutine)
        try:
            return _result(future)
        finally:
            future.cancel()  # cancelling a finished future does nothing

    def answer(self, request: GenerationRequest) -> Completion:
        """The whole answer. Raises as `EngineClient.submit` and its stream."""
        return self.run(self._room.answer(self.engine, request))

    def answer_all(
        self, requests: list[GenerationRequest], max_at_once: int, on_progress: Progress | None
    ) -> list[Completion]:
        """The whole answers, in order, computed together. The first error aborts the others and is raised,
        with a note of its position; so does an error of `on_progress`."""
        counts: SimpleQueue[int | None] = SimpleQueue()
        future = self._send(_answer_all(self.engine, requests, max_at_once, self._room, counts.put))
        future.add_done_callback(lambda _: counts.put(None))
        try:
            # Here, not on the loop: a callback may take its time, raise, or use this LLM itself.
            while (num_done := counts.get()) is not None:
                if on_progress is not None:
                    on_progress(num_done, len(requests))
        finally:
            future.cancel()
        return _result(future)

    def stream(self, request: GenerationRequest) -> Generator[StreamEvent, None, None]:
        """The answer's events. They are kept for a reader that takes its time; one that leaves aborts it."""
        events: SimpleQueue[StreamEvent | Exception | None] = SimpleQueue()
        future = self._send(_put_all(self.engine, request, events.put))
        try:
            while (event := events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            future.cancel()

    def _send(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        with self._lock:
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise Draining(_CLOSED)

    async def _live(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        try:
            await self.engine.start()
        except BaseException as error:
            started.set_exception(error)
            raise
        started.set_result(asyncio.get_running_loop())
        await self._ended.wait()
        await self.engine.aclose()


def _result(future: Future[_T]) -> _T:
    try:
        return future.result()
    except CancelledError:
        raise Draining(_CLOSED) from None


# On the engine's event loop.


class _Room:
    """For requests whose whole answer is wanted, whichever thread asked: one that finds the queue full waits
    for another of them to end."""

    def __init__(self) -> None:
        self._num_asking = 0
        self._one_ended = asyncio.Event()

    async def answer(self, engine: AsyncEngine, request: GenerationRequest) -> Completion:
        """Raises as `EngineClient.submit` and its stream; QueueFull if no other is there to make room."""
        while True:
            self._num_asking += 1
            must_wait = False
            try:
                return await _answer(engine, request)
            except QueueFull:
                if self._num_asking == 1:
                    raise
                must_wait = True
            finally:
                self._num_asking -= 1
                if not must_wait:
                    self._one_ended.set()  # wakes all that wait now
                    self._one_ended.clear()
            await self._one_ended.wait()


async def _answer(engine: AsyncEngine, request: GenerationRequest) -> Completion:
    builder = CompletionBuilder()
    async with opened(engine, request) as events:
        async for event in events:
            builder.add(event)
    return builder.build()


async def _put_all(
    engine: AsyncEngine, request: GenerationRequest, put: Callable[[StreamEvent | Exception | None], object]
) -> None:
    """The events, the error if there is one, and None."""
    try:
        async with opened(engine, request) as events:
            async for event in events:
                put(event)
    except asyncio.CancelledError:
        put(Draining(_CLOSED))  # or else the reader has left, and reads no more
        raise
    except Exception as error:  # whatever it is, the reader raises it
        put(error)
    finally:
        put(None)


async def _answer_all(
    engine: AsyncEngine,
    requests: list[GenerationRequest],
    max_at_once: int,
    room: _Room,
    tell: Callable[[int], object],
) -> list[Completion]:
    """As many are asked at once as may wait: the scheduler finds what runs well together. tell: called with
    how many are done."""
    answers: dict[int, Completion] = {}
    left = iter(enumerate(requests))

    async def work() -> None:
        for position, request in left:
            try:
                answers[position] = await room.answer(engine, request)
            except Exception as error:
                error.add_note(f"prompts[{position}]")
                raise
            tell(len(answers))

    workers = [asyncio.create_task(work()) for _ in range(min(len(requests), max_at_once))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [answers[position] for position in range(len(requests))]
