"""An engine whose steps hang says so, and is given up in time; one whose readers lag does not hang."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.engine_bench import (
    OPTIONS,
    outcome_of,
    serving,
)

from pageturner.service.engine.api import (
    Condition,
    EngineHealth,
)
from pageturner.service.engine.stream import BufferedStream
from pageturner.service.engine.thread_messages import Resume
from pageturner.service.errors import (
    EngineDead,
)


async def test_a_step_that_hangs_is_reported_and_its_return_too() -> None:
    async with serving(gated=True) as bench:
        beginnings = bench.step_beginnings()
        submitting = asyncio.ensure_future(bench.submit(max_tokens=2))
        await beginnings.get()
        bench.engine._watchdog.check()
        seen = [bench.engine.health]
        bench.clock.advance(OPTIONS.stall_seconds + 1)
        bench.engine._watchdog.check()
        bench.engine._watchdog.check()
        seen.append(bench.engine.health)
        assert [entry["event"] for entry in bench.log].count("engine_stalled") == 1
        bench.open()
        assert await outcome_of(await submitting) is None
        bench.engine._watchdog.check()
        seen.append(bench.engine.health)
        assert seen == [EngineHealth.SERVING, EngineHealth.STALLED, EngineHealth.SERVING]
        assert bench.engine._engine.metrics.snapshot().counters["engine_stalls_total"] == 1


async def test_the_condition_tells_why_a_step_that_hangs_takes_no_work() -> None:
    async with serving(gated=True) as bench:
        beginnings = bench.step_beginnings()
        submitting = asyncio.ensure_future(bench.submit(max_tokens=2))
        await beginnings.get()
        assert bench.engine.condition == Condition(EngineHealth.SERVING, "", 1, 0.0)
        bench.clock.advance(OPTIONS.stall_seconds + 1)
        bench.engine._watchdog.check()
        bench.clock.advance(4)
        now = bench.engine.condition
        assert now == Condition(EngineHealth.STALLED, "the step under way has taken 65 s", 1, 65.0)
        assert (now.is_ready, now.is_alive) == (False, True)
        bench.open()
        assert await outcome_of(await submitting) is None


async def test_requests_that_no_step_takes_up_are_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost wake-up: the thread sleeps, though a request waits for its second step."""
    loop, asleep = asyncio.get_running_loop(), asyncio.Event()

    def for_ever() -> None:
        loop.call_soon_threadsafe(asleep.set)

    async with serving() as bench:
        with monkeypatch.context() as patch:
            patch.setattr(bench.engine._engine, "seconds_to_next_step", for_ever)
            stream = await bench.submit(max_tokens=2)
            await asleep.wait()
            bench.engine._watchdog.check()
            bench.clock.advance(OPTIONS.stall_seconds + 1)
            bench.engine._watchdog.check()
            now = bench.engine.condition
        assert now.health is EngineHealth.STALLED
        assert now.reason == "no step has begun for 61 s, though requests wait for one"
        bench.engine._send(Resume("nobody"))  # what wakes it
        assert await outcome_of(stream) is None
        bench.engine._watchdog.check()
        assert bench.engine.condition.is_ready


async def test_a_request_whose_reader_lags_is_no_work_that_waits() -> None:
    options = replace(OPTIONS, slow_consumer_timeout_seconds=1000.0)
    async with serving(gated=True, options=options) as bench:
        submitting = asyncio.ensure_future(bench.submit(max_tokens=20))
        bench.allow(1)
        stream = await submitting
        assert isinstance(stream, BufferedStream)
        # A loop that is busy has tokens wait for it: no step may run ahead of what the reader is given.
        for num_tokens in range(1, OPTIONS.stream_buffer_tokens + 1):
            while stream.num_buffered_tokens < num_tokens:  # noqa: ASYNC110  # no event
                await asyncio.sleep(0)
            bench.allow(1)
        thread = bench.engine._thread
        assert thread is not None
        while bench.engine._live.has_work() or thread.busy_since is not None:  # noqa: ASYNC110  # no event
            await asyncio.sleep(0)
        bench.engine._watchdog.check()
        bench.clock.advance(OPTIONS.stall_seconds + 1)
        bench.engine._watchdog.check()
        assert bench.engine.condition == Condition(EngineHealth.SERVING, "", 1, 0.0)
        await stream.aclose()


async def test_an_engine_that_hangs_for_too_long_is_given_up() -> None:
    options = replace(OPTIONS, dead_after_seconds=120.0)
    async with serving(gated=True, options=options) as bench:
        beginnings = bench.step_beginnings()
        submitting = asyncio.ensure_future(bench.submit(max_tokens=2))
        await beginnings.get()
        bench.clock.advance(119)
        bench.engine._watchdog.check()
        assert bench.engine.condition.is_alive
        bench.clock.advance(2)
        bench.engine._watchdog.check()
        now = bench.engine.condition
        assert (now.is_ready, now.is_alive) == (False, False)
        assert now.reason == "the step under way has taken 121 s, and engine.dead_after_seconds is 120"
        assert isinstance(await outcome_of(await submitting), EngineDead)
