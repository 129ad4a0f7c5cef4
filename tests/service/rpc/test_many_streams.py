"""Many streams at once over many connections: each ends once and whole; those never read are given up."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from support.real_service import real_service
from support.serving import capturing_logger, serving

from pageturner.service.bench.null_service import NullLoad, NullParts
from pageturner.service.bench.stream_clients import StreamTask, run
from pageturner.service.bench.streams import StreamsPlan, measure_streams
from pageturner.service.config import cache_directory
from pageturner.service.core.clock import MonotonicClock
from pageturner.service.engine.metrics import Metrics
from pageturner.service.engine.options import EngineOptions


def unheard() -> None:
    """All streams are open."""


async def never() -> None:
    """Nobody leaves."""


async def test_hundreds_of_streams_end_once_and_whole() -> None:
    load = NullLoad(num_streams=300, prompt_tokens=8, output_tokens=6, step_seconds=0.001)
    parts = NullParts.read(load, cache_directory(), MonotonicClock(), capturing_logger()[0])
    engine, _ = parts.service(Metrics())
    await engine.start()
    async with serving(engine) as served:
        task = StreamTask(300, connections=30, output_tokens=6, is_read=True)
        counts = await run(f"localhost:{served.port}", task, unheard, never)
        assert (counts.whole, counts.faults) == (300, {})
        assert engine.load().num_blocks_used == 0
    await engine.aclose()


async def test_a_stream_that_ends_otherwise_is_counted_as_a_fault() -> None:
    async with real_service(max_num_seqs=1, max_waiting=2) as service:
        task = StreamTask(12, connections=2, output_tokens=4, is_read=True)
        counts = await run(service.target, task, unheard, never)
        assert counts.whole >= 1
        assert sum(counts.faults.values()) == 12 - counts.whole
        assert all("queue_full" in fault for fault in counts.faults)
        assert json.loads(json.dumps(asdict(counts))) == {"whole": counts.whole, "faults": counts.faults}


async def test_clients_that_never_read_hold_little_and_are_given_up() -> None:
    """Each holds its buffer and what a step adds at most; their blocks come back, and others are served."""
    options = EngineOptions(stream_buffer_tokens=8, slow_consumer_timeout_seconds=1.0)
    async with real_service(
        num_blocks=4000,
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=256,
        engine_options=options,
    ) as service:
        leave = asyncio.Event()
        task = StreamTask(40, connections=40, output_tokens=1500, is_read=False)
        opened = asyncio.Event()
        hanging = asyncio.create_task(run(service.target, task, opened.set, leave.wait))
        await opened.wait()
        most = 0
        while service.num_live:
            live = service.engine._live._live.values()
            most = max([most, *(each.stream.num_buffered_tokens for each in live)])
            await service.client.generate("x", max_tokens=1)
        assert most <= options.stream_buffer_tokens + 64  # the tokens that cross together
        await service.until_idle()
        outcomes = service.metrics.snapshot().requests_finished_total
        assert outcomes["ok"] + outcomes.get("slow_consumer", 0) + outcomes.get("request_aborted", 0) > 40
        assert outcomes.get("slow_consumer", 0) + outcomes.get("request_aborted", 0) == 40, outcomes
        leave.set()
        await hanging


@pytest.mark.slow
def test_two_thousand_streams_end_once_and_whole(tmp_path: Path) -> None:
    plan = StreamsPlan(2000, 50, connections=500, client_processes=2, output_tokens=32, step_seconds=0.05)
    result = measure_streams(plan, cache_directory(), lambda text: None)
    assert result.is_without_loss, result
    assert result.after.descriptors <= result.before.descriptors + 600
