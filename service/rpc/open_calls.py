"""Calls that anybody may make, credentials or none: what one connection may have the server hold for them.

Such a call begins with its name, not with its message: one whose message never comes whole would be held for
ever, and what of it has come as well.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from pageturner.service.errors import DeadlineExceeded, InvalidArgument, QueueFull

MAX_CALLS = 64
"""Of one connection at once: a client watches with one or two, and a proxy probes for several."""
MAX_MESSAGE_BYTES = 4096
"""The longest name to ask for takes a hundred."""
MESSAGE_SECONDS = 10.0
"""How long a message may take to come whole."""

Context = grpc.aio.ServicerContext[Any, Any]
Messages = AsyncIterator[bytes]
Read = Callable[[bytes], Any]


class OpenCalls:
    """Wraps behaviours of one request, to be given the messages of a stream. The one owner of the count."""

    def __init__(self, message_seconds: float = MESSAGE_SECONDS) -> None:
        self._message_seconds = message_seconds
        self._num_calls: Counter[str] = Counter()

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
        """Raises QueueFull for one too many. Clients of a socket file all look like one: they may open it."""
        if peer.startswith("unix"):
            yield
            return
        if self._num_calls[peer] >= MAX_CALLS:
            raise QueueFull(f"{MAX_CALLS} such calls of this connection are open", 1.0)
        self._num_calls[peer] += 1
        try:
            yield
        finally:
            self._num_calls[peer] -= 1
            if not self._num_calls[peer]:
                del self._num_calls[peer]

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
