"""The engine behind asyncio over a scripted scheduler and model: a real thread, a permit for each step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from pageturner.policies.views import Rates
from pageturner.service.core.clock import ManualClock
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.outputs import FinishedEvent, TokenEvent
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.engine.api import (
    EngineHealth,
    GenerationRequest,
    ModelInfo,
    RequestStream,
    ServerInfo,
    StreamEvent,
)
from pageturner.service.engine.async_engine import AsyncEngine
from pageturner.service.engine.engine import Engine
from pageturner.service.engine.metrics import Metrics
from pageturner.service.engine.options import EngineOptions
from pageturner.service.engine.step_computation import Device, DirectSteps
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.errors import (
    PageturnerError,
)
from support.scripted import ScriptedModel, ScriptedScheduler, recording_logger, text_of, token_at
from support.tiny_tokenizers import byte_level_bpe

MODEL = ModelInfo(
    name="tiny",
    source="here",
    architecture="Scripted",
    backend="scripted",
    dtype="float32",
    deterministic=True,
    vocab_size=500,
    max_model_len=64,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    num_parameters=0,
    eos_token_ids=(1,),
    has_chat_template=False,
)
SERVER = ServerInfo("1", 0.5, 0.0, 16, 8, 0, 1, 8, 64, "reference", Rates(), {})
OPTIONS = EngineOptions(stream_buffer_tokens=4, slow_consumer_timeout_seconds=5.0, stall_seconds=60.0)
PROMPT = (5, 6, 7)


@dataclass
class Bench:
    """An engine that serves, and everything below it within reach."""

    engine: AsyncEngine
    scheduler: ScriptedScheduler
    model: ScriptedModel
    clock: ManualClock
    log: list[MutableMapping[str, Any]]
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def in_lockstep(self) -> None:
        """From now on the loop sees what one step put out before the next step begins."""
        loop = asyncio.get_running_loop()
        self.model.on_forward = lambda _: asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()

    def step_beginnings(self) -> asyncio.Queue[None]:
        """Gets an item whenever a step begins to compute."""
        loop, beginnings = asyncio.get_running_loop(), asyncio.Queue[None]()
        self.model.on_forward = lambda _: loop.call_soon_threadsafe(beginnings.put_nowait, None)
        return beginnings

    def allow(self, num_steps: int) -> None:
        self.gate.release(num_steps)

    def open(self) -> None:
        """No step waits any more."""
        self.model.gate = None
        self.gate.release()

    async def submit(
        self, request_id: str = "", max_tokens: int = 3, n: int = 1, seed: int = 0
    ) -> RequestStream:
        params = SamplingParams(max_tokens=max_tokens, n=n, seed=seed)
        return await self.engine.submit(GenerationRequest(PROMPT, params, request_id))


@asynccontextmanager
async def serving(
    *,
    gated: bool = False,
    max_requests: int = 1000,
    options: EngineOptions = OPTIONS,
    has_tokenizer: bool = True,
    device: Device | None = None,
) -> AsyncIterator[Bench]:
    clock, scheduler, model = ManualClock(100.0), ScriptedScheduler(max_requests), ScriptedModel()
    logger, log = recording_logger()
    engine = Engine(
        scheduler,
        DirectSteps(model, model, model),
        clock=clock,
        options=options,
        metrics=Metrics(),
        logger=logger,
        device=device,
    )
    async_engine = AsyncEngine(
        engine,
        Tokenizer(byte_level_bpe()) if has_tokenizer else None,
        model=MODEL,
        server_info=SERVER,
        scheduler_options=SchedulerOptions(max_n=4),
        options=options,
        clock=clock,
        random=Random(0),
        logger=logger,
    )
    bench = Bench(async_engine, scheduler, model, clock, log)
    model.gate = bench.gate if gated else None
    await async_engine.start()
    try:
        yield bench
    finally:
        bench.open()
        await async_engine.aclose()
    if async_engine.health is not EngineHealth.DEAD:
        assert scheduler.entries == {}, "a request outlived its engine"


async def read_all(stream: RequestStream) -> list[StreamEvent]:
    return [event async for event in stream]


async def outcome_of(stream: RequestStream) -> PageturnerError | None:
    """Read to the end; the error that ended the stream, None if all went well."""
    last: StreamEvent | None = None
    try:
        async for event in stream:
            last = event
    except PageturnerError as error:
        return error
    assert isinstance(last, FinishedEvent)
    return None


def text_of_choice(events: list[StreamEvent], index: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, TokenEvent) and event.index == index)


def expected_text(seed: int, max_tokens: int, index: int = 0) -> str:
    return "".join(text_of(token_at(seed, index, len(PROMPT) + i)) for i in range(max_tokens))
