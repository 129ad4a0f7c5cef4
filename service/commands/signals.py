"""Runs a command's coroutine so that the signals that end a program end it as Ctrl-C does."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

Result = TypeVar("Result")


def ending_signals() -> tuple[signal.Signals, ...]:
    """The signals beside Ctrl-C that end a command: SIGTERM and SIGHUP, unless ignored.

    What was ignored when the program started stays so: `nohup` counts on it, and so do the background jobs
    of a shell.
    """
    return tuple(number for number in (signal.SIGTERM, signal.SIGHUP) if not is_ignored(number))


def is_ignored(number: signal.Signals) -> bool:
    """Whether the program was started with this signal ignored, or has chosen so since."""
    return signal.getsignal(number) is signal.SIG_IGN


def run(coroutine: Coroutine[Any, Any, Result], runner: asyncio.Runner | None = None) -> Result:
    """`asyncio.run`, or `runner.run`. Raises SystemExit, as the program's own handlers do, once the coroutine
    is unwound, or done all the same, that a signal should end.

    Those handlers raise wherever the program stands, which within a loop may be a callback of gRPC's that
    swallows it; here the signal is noted, and the loop told to cancel the coroutine.
    """
    received: list[int] = []
    run_to_end = asyncio.run if runner is None else runner.run
    try:
        result = run_to_end(_cancelled_by_signals(coroutine, received))
    except asyncio.CancelledError:
        if not received:
            raise
    if received:
        raise SystemExit(128 + received[0])
    return result


async def _cancelled_by_signals(coroutine: Coroutine[Any, Any, Result], received: list[int]) -> Result:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def end(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        loop.call_soon_threadsafe(task.cancel)

    before = {number: signal.signal(number, end) for number in ending_signals()}
    try:
        return await coroutine
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
