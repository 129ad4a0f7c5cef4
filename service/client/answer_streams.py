"""An answer as it comes, for either kind of client: to be read, left early, and asked how it fares."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from types import TracebackType
from typing import Any, Self

from pageturner.service.client.partial_answer import PartialAnswer
from pageturner.service.engine.api import StreamEvent


class AnswerStream(Generator[StreamEvent, None, None]):
    """AcceptedEvent; TokenEvents and a ChoiceFinishedEvent for each choice; FinishedEvent.

    `with client.stream(...) as events` ends the request when the block is left, whatever is left unread.
    """

    def __init__(self, events: Generator[StreamEvent, None, None], answer: PartialAnswer) -> None:
        self._events = events
        self._answer = answer

    @property
    def request_id(self) -> str:
        """The id in force, for `abort`; empty until a server has accepted a request that names none."""
        return self._answer.request_id

    @property
    def num_resumes(self) -> int:
        """How often the answer broke off and went on."""
        return self._answer.num_resumes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __next__(self) -> StreamEvent:
        return next(self._events)

    def send(self, value: None) -> StreamEvent:
        return self._events.send(value)

    def throw(self, *error: Any) -> StreamEvent:
        return self._events.throw(*error)

    def close(self) -> None:
        """End the request, unless it has ended. Closing twice is no error."""
        self._events.close()


class AsyncAnswerStream(AsyncGenerator[StreamEvent, None]):
    """`AnswerStream` for asyncio: `async with client.stream(...) as events`."""

    def __init__(self, events: AsyncGenerator[StreamEvent, None], answer: PartialAnswer) -> None:
        self._events = events
        self._answer = answer

    @property
    def request_id(self) -> str:
        """The id in force, for `abort`; empty until a server has accepted a request that names none."""
        return self._answer.request_id

    @property
    def num_resumes(self) -> int:
        """How often the answer broke off and went on."""
        return self._answer.num_resumes

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def __anext__(self) -> StreamEvent:
        return await anext(self._events)

    async def asend(self, value: None) -> StreamEvent:
        return await self._events.asend(value)

    async def athrow(self, *error: Any) -> StreamEvent:
        return await self._events.athrow(*error)

    async def aclose(self) -> None:
        """End the request, unless it has ended. Closing twice is no error."""
        await self._events.aclose()
