"""One question to several processes, of which one may hang, or be dead. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

Calls = Sequence[Coroutine[Any, Any, Any]]


async def all_of(calls: Calls, seconds: float) -> list[Any]:
    """What each call returns, in order; the exception in place of an answer that did not come, TimeoutError
    where it did not come in so many seconds."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        return [_outcome(task) for task in tasks]
    finally:
        _cancel(tasks)


async def any_of(calls: Calls, holds: Callable[[Any], bool], seconds: float) -> bool:
    """Whether what a call returns holds of one at least; nobody waits for the others then."""
    tasks = pending = {asyncio.ensure_future(call) for call in calls}
    try:
        async with asyncio.timeout(seconds):
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if any(not task.exception() and holds(task.result()) for task in done):
                    return True
    except TimeoutError:
        return False
    finally:
        _cancel(tasks)
    return False


def _outcome(task: asyncio.Task[Any]) -> Any:
    if not task.done():
        return TimeoutError()
    return task.exception() or task.result()


def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Those that have ended stay as they are."""
    for task in tasks:
        task.cancel()
