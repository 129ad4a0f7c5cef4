"""A signal that comes while a command's loop runs ends its coroutine, whatever the loop is just doing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from pageturner.service.commands import signals


class _Raised(Exception):
    """By the handler that was there before."""


def _raise(number: int, frame: FrameType | None) -> None:
    raise _Raised


@pytest.fixture(params=[signal.SIGTERM, signal.SIGHUP])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    before = signal.signal(request.param, _raise)
    yield request.param
    signal.signal(request.param, before)


def test_the_coroutine_is_unwound_and_the_program_ends(number: signal.Signals) -> None:
    unwound = []

    async def command() -> None:
        # In a callback, as of a library that swallows what is raised there.
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), number)
        try:
            await asyncio.Event().wait()
        finally:
            unwound.append(True)

    with pytest.raises(SystemExit) as ended:
        signals.run(command())
    assert ended.value.code == 128 + number
    assert unwound
    assert signal.getsignal(number) is _raise


def test_between_two_coroutines_of_a_runner_the_handler_of_before_is_back(number: signal.Signals) -> None:
    async def command() -> int:
        return 7

    with asyncio.Runner() as runner:
        assert signals.run(command(), runner) == 7
        with pytest.raises(_Raised):
            os.kill(os.getpid(), number)
        assert signals.run(command(), runner) == 7


def test_a_signal_that_comes_too_late_to_cancel_ends_the_program_all_the_same(number: signal.Signals) -> None:
    async def command() -> None:
        os.kill(os.getpid(), number)

    with pytest.raises(SystemExit) as ended:
        signals.run(command())
    assert ended.value.code == 128 + number


def test_another_cancellation_is_not_taken_for_a_signal() -> None:
    async def command() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        signals.run(command())
