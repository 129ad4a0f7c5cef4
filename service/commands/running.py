"""Runs a command's coroutine so that the signals that end a program end it as Ctrl-C does."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

_ENDING = (signal.SIGTERM, signal.SIGHUP)


def run(coroutine: Coroutine[Any, Any, Result], runner: asyncio.Runner | None = None) -> Result:
    """`asyncio.run`, or `runner.run`. Raises SystemExit, as the program's own handlers do, once the coroutine
    that a signal ended is unwound.

    Those handlers raise wherever the program stands, which within a loop may be a callback of gRPC's that
    swallows it; here the loop is told, and cancels the coroutine.
    """
    received: list[int] = []
    run_to_end = asyncio.run if runner is None else runner.run
    try:
        return run_to_end(_cancelled_by_signals(coroutine, received))
    except asyncio.CancelledError:
        if not received:
            raise
        raise SystemExit(128 + received[0]) from None


async def _cancelled_by_signals(coroutine: Coroutine[Any, Any, Result], received: list[int]) -> Result:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def end(number: int) -> None:
        received.append(number)
        task.cancel()

    before = {number: signal.getsignal(number) for number in _ENDING}
    for number in _ENDING:
        loop.add_signal_handler(number, end, number)
    try:
        return await coroutine
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)  # leaves the system's own
            signal.signal(number, handler)
