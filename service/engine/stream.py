"""The buffer between the step loop and one reader. Lives on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from pageturner.service.core.outputs import FinishedEvent, SampledToken, TokenEvent
from pageturner.service.engine.api import StreamEvent
from pageturner.service.errors import PageturnerError


class _Tokens:
    """Token events of one choice that wait to be read as one. Mostly there is only the first."""

    __slots__ = ("_first", "_more")

    def __init__(self, first: TokenEvent) -> None:
        self._first = first
        self._more: list[TokenEvent] | None = None

    def add(self, event: TokenEvent) -> None:
        if self._more is None:
            self._more = [event]
        else:
            self._more.append(event)

    def joined(self) -> TokenEvent:
        first, more = self._first, self._more
        if more is None:
            return first
        tokens: list[SampledToken] = list(first.tokens)
        for event in more:
            tokens += event.tokens
        text = first.text + "".join([event.text for event in more])
        return TokenEvent(first.request_id, first.index, tuple(tokens), text)


class BufferedStream:
    """Implements `api.RequestStream`. One task reads; `push` and `fail` come from the engine's side.

    on_full, on_drained: called when stream_buffer_tokens wait, and when the reader has brought that
    down to half. on_leave: called once, if the reader leaves before the end. on_close: called once, when
    the reader has had the end, or has left.
    """

    def __init__(
        self,
        request_id: str,
        max_tokens: int,
        *,
        on_full: Callable[[], None],
        on_drained: Callable[[], None],
        on_leave: Callable[[], None],
        on_close: Callable[[], None],
    ) -> None:
        self._request_id = request_id
        self._max_tokens = max_tokens
        self._on_full, self._on_drained = on_full, on_drained
        self._on_leave, self._on_close = on_leave, on_close
        self._buffer: deque[StreamEvent | _Tokens] = deque()
        # The waiting tokens of each choice. A choice's tokens precede its finish, so adding to them
        # never overtakes anything of the same choice.
        self._waiting: dict[int, _Tokens] = {}
        self._num_tokens = 0
        self._is_full = False
        self._is_ended = False
        self._is_left = False
        self._is_closed = False
        self._error: PageturnerError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def request_id(self) -> str:
        """The id under which the request was accepted."""
        return self._request_id

    @property
    def num_buffered_tokens(self) -> int:
        """Tokens that the reader has yet to take."""
        return self._num_tokens

    @property
    def is_full(self) -> bool:
        """Whether its reader lags, so that its request is paused."""
        return self._is_full

    def push(self, event: StreamEvent) -> None:
        """Take an event for the reader; after the end, or after the reader left, it is dropped."""
        if self._is_ended or self._is_left:
            return
        if type(event) is TokenEvent:
            self._push_tokens(event)
        elif isinstance(event, FinishedEvent) and event.error is not None:
            self.fail(event.error)
        else:
            self._buffer.append(event)
            self._is_ended = isinstance(event, FinishedEvent)
        self._wake()

    def fail(self, error: PageturnerError) -> None:
        """End the stream with an error, after what waits already."""
        if not self._is_ended:
            self._is_ended, self._error = True, error
            self._wake()

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self

    async def __anext__(self) -> StreamEvent:
        while not self._buffer:
            if self._error is not None and not self._is_left:
                error, self._error = self._error, None
                self._close()
                raise error
            if self._is_ended or self._is_left:
                self._close()
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        event = self._buffer.popleft()
        return self._take(event) if type(event) is _Tokens else event  # type: ignore[return-value] # no _Tokens

    async def aclose(self) -> None:
        """The reader leaves: what waits is dropped, and a request that still runs is aborted."""
        if self._is_left:
            return
        self._is_left = True
        self._buffer.clear()
        self._waiting.clear()
        self._wake()
        if not self._is_ended:
            self._on_leave()
        self._close()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():  # its reader was cancelled
                waiter.set_result(None)

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._on_close()

    def _push_tokens(self, event: TokenEvent) -> None:
        tokens = self._waiting.get(event.index)
        if tokens is None:
            self._waiting[event.index] = tokens = _Tokens(event)
            self._buffer.append(tokens)
        else:
            tokens.add(event)
        self._num_tokens += len(event.tokens)
        if self._num_tokens >= self._max_tokens and not self._is_full:
            self._is_full = True
            self._on_full()

    def _take(self, tokens: _Tokens) -> TokenEvent:
        event = tokens.joined()
        del self._waiting[event.index]
        self._num_tokens -= len(event.tokens)
        if self._is_full and self._num_tokens <= self._max_tokens // 2:
            self._is_full = False
            if not self._is_ended:
                self._on_drained()
        return event
