"""Two things that an event loop is asked in more than one place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """From any thread. A loop that was closed has no readers left, and nothing is called."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event was set before so many seconds were over."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True
