"""A write that takes too long ends its call; a process that stood still ends none."""

from __future__ import annotations

import asyncio
import time

import pytest

from pageturner.service.errors import SlowConsumer
from pageturner.service.rpc.write_watch import WriteWatch

SECONDS = 0.05


async def test_a_write_without_end_is_late() -> None:
    async def write() -> None:
        with WriteWatch(SECONDS) as watch:
            watch.write_begins()
            await asyncio.Event().wait()

    with pytest.raises(SlowConsumer, match=r"not read for 0\.05 s"):
        await write()


async def test_writes_that_end_are_not_late_however_many_there_are() -> None:
    with WriteWatch(SECONDS) as watch:
        for _ in range(12):
            watch.write_begins()
            await asyncio.sleep(SECONDS / 4)
            watch.write_ended()


async def test_a_pause_between_writes_is_nobodys_delay() -> None:
    with WriteWatch(SECONDS) as watch:
        watch.write_begins()
        watch.write_ended()
        await asyncio.sleep(3 * SECONDS)


async def test_a_process_that_stood_still_does_not_take_it_for_the_clients_delay() -> None:
    """Stopped (SIGSTOP), or without a processor: the clock went on; that there was room is not known yet."""
    with WriteWatch(SECONDS) as watch:
        watch.write_begins()
        time.sleep(3 * SECONDS)  # noqa: ASYNC251  # it stands still
        await asyncio.sleep(0)
        await asyncio.sleep(SECONDS / 8)
        watch.write_ended()
        await asyncio.sleep(0)


async def test_the_task_is_cancelled_for_others_still() -> None:
    """A cancellation from elsewhere is no SlowConsumer."""

    async def write() -> None:
        with WriteWatch(60.0) as watch:
            watch.write_begins()
            await asyncio.Event().wait()

    task = asyncio.create_task(write())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
