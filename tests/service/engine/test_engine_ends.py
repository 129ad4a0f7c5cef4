"""How an engine ends: drained, closed or dead, every stream is told, and none twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from support.engine_bench import (
    MODEL,
    OPTIONS,
    PROMPT,
    SERVER,
    outcome_of,
    serving,
)
from support.scripted import recording_logger

from pageturner.service.core.options import SchedulerOptions
from pageturner.service.engine.api import (
    AbortOutcome,
    EngineHealth,
    GenerationRequest,
)
from pageturner.service.engine.async_engine import AsyncEngine
from pageturner.service.errors import (
    Draining,
    EngineDead,
    Loading,
    StepFailed,
)


async def test_a_dying_engine_ends_every_stream() -> None:
    async with serving(gated=True) as bench:
        watching = asyncio.ensure_future(bench.engine.wait_for_health_change(EngineHealth.SERVING))
        bench.allow(1)
        streams = await asyncio.gather(*(bench.submit(max_tokens=100) for _ in range(8)))
        reading = [asyncio.ensure_future(outcome_of(stream)) for stream in streams]
        submitting = asyncio.ensure_future(bench.submit("late"))
        await asyncio.sleep(0)
        bench.scheduler.fault = AssertionError("our bug")
        bench.open()
        assert await watching is EngineHealth.DEAD
        for outcome in reading:
            assert isinstance(await outcome, EngineDead)
        with pytest.raises(EngineDead, match="our bug"):
            await submitting
        with pytest.raises(EngineDead):
            await bench.submit()
        assert await bench.engine.abort("late") is AbortOutcome.NOT_FOUND
        await asyncio.gather(*(stream.aclose() for stream in streams))
        assert [entry["event"] for entry in bench.log].count("engine_dead") == 1


async def test_a_failing_model_kills_the_engine_within_its_bound() -> None:
    async with serving(gated=True, options=replace(OPTIONS, max_consecutive_failures=2)) as bench:
        bench.allow(2)
        streams = await asyncio.gather(*(bench.submit(max_tokens=1000) for _ in range(8)))
        bench.model.fail_in["forward"] = RuntimeError("broken")
        bench.open()
        errors = [type(await outcome_of(stream)) for stream in streams]
        assert Counter(errors) == {StepFailed: 1, EngineDead: 7}
        assert bench.engine.health is EngineHealth.DEAD


async def test_a_drain_lets_the_running_finish() -> None:
    async with serving(gated=True) as bench:
        bench.allow(1)
        stream = await bench.submit(max_tokens=4)
        draining = asyncio.ensure_future(bench.engine.drain(grace_seconds=60.0))
        assert await bench.engine.wait_for_health_change(EngineHealth.SERVING) is EngineHealth.DRAINING
        with pytest.raises(Draining):
            await bench.submit()
        bench.open()
        assert await outcome_of(stream) is None
        await draining


async def test_a_drain_without_grace_aborts_the_rest() -> None:
    async with serving(gated=True) as bench:
        bench.allow(1)
        stream = await bench.submit(max_tokens=1000)
        draining = asyncio.ensure_future(bench.engine.drain(grace_seconds=0.0))
        await bench.engine.wait_for_health_change(EngineHealth.SERVING)
        bench.open()
        await draining
        error = await outcome_of(stream)
        assert isinstance(error, Draining)
        assert "shutting down" in str(error)


async def test_closing_twice_and_at_once() -> None:
    async with serving() as bench:
        stream = await bench.submit(max_tokens=1000)
        await asyncio.gather(bench.engine.aclose(), bench.engine.aclose())
        await bench.engine.aclose()
        assert isinstance(await outcome_of(stream), Draining)
        with pytest.raises(Draining):
            await bench.submit()


async def test_a_close_does_not_wait_for_a_step_that_hangs() -> None:
    async with serving(gated=True, options=replace(OPTIONS, shutdown_seconds=0.01)) as bench:
        bench.allow(1)
        beginnings = bench.step_beginnings()
        stream = await bench.submit(max_tokens=1000)
        for _ in range(2):
            await beginnings.get()
        await bench.engine.aclose()
        assert bench.engine.health is EngineHealth.DEAD
        assert isinstance(await outcome_of(stream), EngineDead)


async def test_before_its_start_the_engine_refuses() -> None:
    async with serving() as bench:
        unstarted = AsyncEngine(
            bench.engine._engine,
            None,
            model=MODEL,
            server_info=SERVER,
            scheduler_options=SchedulerOptions(max_n=1),
            options=OPTIONS,
            clock=bench.clock,
            random=Random(0),
            logger=recording_logger()[0],
        )
        assert unstarted.health is EngineHealth.STARTING
        with pytest.raises(Loading, match="starting"):
            await unstarted.submit(GenerationRequest(PROMPT))
        await unstarted.aclose()
