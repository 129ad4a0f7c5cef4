"""Calls that anybody may make, credentials or none: what the server holds for them, of one connection and of
all.

Such a call begins with its name, not with its message: one whose message never comes whole would be held for
ever, and what of it has come as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from pageturner.service.errors import DeadlineExceeded, InvalidArgument, QueueFull

MAX_CALLS = 64
"""Of one connection at once: a client watches with one or two, and a proxy probes for several."""
MAX_ALL_CALLS = 4096
"""Of all connections at once, some 80 MB. One too many takes the place of the oldest call of the connection
that has most, so that connections without end do not keep probes out."""
MAX_MESSAGE_BYTES = 4096
"""The longest name to ask for takes a hundred."""
MESSAGE_SECONDS = 10.0
"""How long a message may take to come whole."""

Context = grpc.aio.ServicerContext[Any, Any]
Messages = AsyncIterator[bytes]
Read = Callable[[bytes], Any]


@dataclass(slots=True, eq=False)
class _OpenCall:
    """One call under way, by the task that answers it."""

    task: asyncio.Task[Any]
    is_displaced: bool = False


class OpenCalls:
    """Wraps behaviours of one request, to be given the messages of a stream. The one owner of the count."""

    def __init__(self, message_seconds: float = MESSAGE_SECONDS, max_calls: int = MAX_ALL_CALLS) -> None:
        self._message_seconds = message_seconds
        self._max_calls = max_calls
        self._num_calls = 0
        self._calls: dict[str, dict[_OpenCall, None]] = {}  # by connection, in the order in which they came

    @property
    def num_calls(self) -> int:
        """Calls under way."""
        return self._num_calls

    def unary(
        self, behaviour: Callable[[Any, Context], Awaitable[Any]], read: Read
    ) -> Callable[[Messages, Context], Awaitable[Any]]:
        """A behaviour with one answer. read: a message to a request."""

        async def answer(messages: Messages, context: Context) -> Any:
            with self._counted(context.peer()):
                return await behaviour(read(await self._first(messages)), context)

        return answer

    def stream(
        self, behaviour: Callable[[Any, Context], AsyncIterator[Any]], read: Read
    ) -> Callable[[Messages, Context], AsyncIterator[Any]]:
        """A behaviour with a stream of answers."""

        async def answers(messages: Messages, context: Context) -> AsyncIterator[Any]:
            with self._counted(context.peer()):
                request = read(await self._first(messages))
                async with aclosing(behaviour(request, context)) as found:  # type: ignore[type-var] # a generator
                    async for each in found:
                        yield each

        return answers

    @contextmanager
    def _counted(self, peer: str) -> Iterator[None]:
        """Raises QueueFull for one too many of a connection, and in a call that had to give its place up.
        Clients of a socket file all look like one: they may open it."""
        if peer.startswith("unix"):
            yield
            return
        if len(self._calls.get(peer, ())) >= MAX_CALLS:
            raise QueueFull(f"{MAX_CALLS} such calls of this connection are open", 1.0)
        if self._num_calls >= self._max_calls:
            self._displace_one()
        task = asyncio.current_task()
        assert task is not None
        call = _OpenCall(task)
        self._add(peer, call)
        try:
            yield
        except asyncio.CancelledError:
            if not call.is_displaced:
                raise
            task.uncancel()
            raise QueueFull(f"{self._max_calls} such calls are open, and others have fewer", 1.0) from None
        finally:
            self._remove(peer, call)

    def _add(self, peer: str, call: _OpenCall) -> None:
        self._num_calls += 1
        self._calls.setdefault(peer, {})[call] = None

    def _remove(self, peer: str, call: _OpenCall) -> None:
        calls = self._calls.get(peer, {})
        if call not in calls:
            return
        self._num_calls -= 1
        del calls[call]
        if not calls:
            del self._calls[peer]

    def _displace_one(self) -> None:
        """End the oldest call of the connection that has most; its place is free at once."""
        peer = max(self._calls, key=lambda each: len(self._calls[each]))
        oldest = next(iter(self._calls[peer]))
        oldest.is_displaced = True
        oldest.task.cancel()
        self._remove(peer, oldest)

    async def _first(self, messages: Messages) -> bytes:
        """The one message of a call. Raises InvalidArgument or DeadlineExceeded."""
        try:
            async with asyncio.timeout(self._message_seconds):
                message = await anext(aiter(messages), None)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no message came within {self._message_seconds:g} s") from error
        if message is None:
            raise InvalidArgument("request", "the call ended without a message")
        if len(message) > MAX_MESSAGE_BYTES:
            raise InvalidArgument("request", f"{len(message)} bytes; at most {MAX_MESSAGE_BYTES}")
        return message
