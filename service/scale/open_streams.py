"""The streams that a replica has open, and who follows them: an ingress that dies can not say so, and what it
had asked for would be computed to its end. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from pageturner.service.scale.calls import Call

LOOK_SECONDS = 5.0
"""Between two looks at whether those that follow are still there."""


class OpenStreams:
    """is_gone: whether there is no process of that name any more; one that hangs is there. May block.
    end: ends the request of a call."""

    def __init__(self, is_gone: Callable[[str], bool], end: Callable[[Call], Awaitable[object]]) -> None:
        self._is_gone = is_gone
        self._end = end
        self._open: dict[object, Call] = {}

    @contextmanager
    def followed(self, call: Call) -> Iterator[None]:
        """Around a stream. A call that names nobody is taken to be followed."""
        key = object()
        self._open[key] = call
        try:
            yield
        finally:
            del self._open[key]

    async def end_of_gone(self) -> int:
        """End what nobody follows any more; the number of streams that were ended."""
        gone = [
            follower
            for follower in sorted({call.follower for call in self._open.values()} - {""})
            if await asyncio.to_thread(self._is_gone, follower)
        ]
        left = [call for call in self._open.values() if call.follower in gone]
        for call in left:
            await self._end(call)
        return len(left)
