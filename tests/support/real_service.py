"""A real grpc.aio server over the real engine, scheduler and block traffic; only the model is a fake."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import grpc

from pageturner.policies import registry
from pageturner.policies.interfaces import PolicySet
from pageturner.policies.views import Rates
from pageturner.service.client import Client
from pageturner.service.core.clock import Clock, MonotonicClock
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.outputs import BlockCopies, SampledSequence, SampledToken, SchedulerOutput
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.engine.adapters import Adapters
from pageturner.service.engine.api import ModelInfo, ServerInfo
from pageturner.service.engine.async_engine import AsyncEngine
from pageturner.service.engine.engine import Engine
from pageturner.service.engine.metrics import Metrics
from pageturner.service.engine.options import EngineOptions
from pageturner.service.engine.step_computation import DirectSteps
from pageturner.service.engine.text_output import TextOutput
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.flight.phases import PhaseRecorder
from pageturner.service.rpc.server import Server
from support.fake_model import FakeModel
from support.patience import PATIENCE_SECONDS
from support.scripted import recording_logger
from support.serving import serving
from support.tiny_tokenizers import byte_level_bpe

if TYPE_CHECKING:
    from pageturner.service.monitoring.tracing import Tracing  # OpenTelemetry comes with it

TOKENIZER = Tokenizer(byte_level_bpe())
VOCAB_SIZE = 421
SERVER_FINGERPRINT = "weights=w;tokenizer=t;kernels=fake"
MAX_EMPTY_SCHEDULES = 8
ENGINE_OPTIONS = EngineOptions(max_empty_schedules=MAX_EMPTY_SCHEDULES, max_consecutive_failures=50)


class PagedModel:
    """The engine's three interfaces over the fake model.

    gate: each forward takes one permit, if there is a gate. num_asked: forwards that came to the gate; by
    then the loop has all that the steps before told. fail_apply: as many block transfers fail.
    script: what every choice says after a prompt of one token; nothing is computed then.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self._model = FakeModel(num_blocks, max(1, num_host_blocks), block_size)
        self.gate: threading.Semaphore | None = None
        self.num_asked = 0
        self.num_forwards = 0
        self.fail_apply = 0
        self.script: tuple[int, ...] = ()

    def apply(self, copies: BlockCopies) -> None:
        if self.fail_apply:
            self.fail_apply -= 1
            raise RuntimeError("planted: the plan could not be carried out")
        self._model.kv_cache.apply(copies)

    def forward(self, output: SchedulerOutput) -> SchedulerOutput:
        gate = self.gate
        self.num_asked += 1
        if gate is not None:
            gate.acquire()
        self.num_forwards += 1
        return output

    def note_sampled(self, sampled: tuple[SampledSequence, ...]) -> None:
        """Nothing: the fake model knows what it sampled."""

    def sample(self, logits: SchedulerOutput, output: SchedulerOutput) -> tuple[SampledSequence, ...]:
        if not self.script:
            return self._model.compute(output)
        return tuple(
            SampledSequence(row.seq_id, row.epoch, (SampledToken(self.script[part.end - 1]),))
            for part in output.scheduled
            for row in part.samples
        )


def make_engine(
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    num_host_blocks: int = 0,
    clock: Clock | None = None,
    model: PagedModel | None = None,
    policies: PolicySet | None = None,
    engine_options: EngineOptions = ENGINE_OPTIONS,
    scheduler_class: Callable[..., Scheduler] = Scheduler,
    metrics: Metrics | None = None,
    **options: Any,
) -> Engine:
    """options: SchedulerOptions by name."""
    model = model or PagedModel(num_blocks, num_host_blocks, block_size)
    scheduler = scheduler_class(
        scheduler_options(**options),
        CacheOptions(num_blocks, block_size, num_host_blocks),
        policies or registry.default_policies(),
        TextOutput(TOKENIZER),
        Rates(),
        hash_key=b"test",
    )
    return Engine(
        scheduler,
        DirectSteps(model, model, model),
        clock=clock or MonotonicClock(),
        options=engine_options,
        metrics=metrics or Metrics(),
        logger=recording_logger()[0],
    )


def scheduler_options(**options: Any) -> SchedulerOptions:
    """Small bounds, but for the options that are given."""
    bounds = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16, "max_n": 8}
    return SchedulerOptions(**(bounds | options))


@dataclass(frozen=True, slots=True)
class RealService:
    """channel: for what the client does not offer."""

    engine: AsyncEngine
    model: PagedModel
    server: Server
    metrics: Metrics
    client: Client
    channel: grpc.aio.Channel
    target: str

    def hold_steps(self) -> None:
        """From now on each step waits for a permit."""
        self.model.gate = threading.Semaphore(0)

    def allow_steps(self, count: int) -> None:
        assert self.model.gate is not None
        self.model.gate.release(count)

    async def run_steps(self, count: int) -> None:
        """So many forwards of the model, and no more."""
        if not count:
            return
        wanted = self.model.num_forwards + count
        self.allow_steps(count)
        await self.until(lambda: self.model.num_forwards >= wanted)

    async def finish_step(self) -> None:
        """One held step, to its end: what it told has gone out, apart from what others tell."""
        wanted = self.model.num_asked + 1
        self.allow_steps(1)
        await self.until(lambda: self.model.num_asked >= wanted or not self.num_live)
        await self.client.load()

    def release_steps(self) -> None:
        gate, self.model.gate = self.model.gate, None
        if gate is not None:
            gate.release(1000)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Go round by whole calls, each of which gives server and engine their turn."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not holds():
                await self.client.load()

    async def until_idle(self) -> None:
        """Nothing runs or waits any more, and every block is back."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                load = await self.client.load()
                held = load.num_blocks_used, load.num_host_blocks_used
                if (load.num_running, load.num_waiting, *held) == (0, 0, 0, 0):
                    return

    @property
    def num_live(self) -> int:
        """Requests submitted to the engine whose end it has not told."""
        return len(self.engine._live)

    def num_handled(self, code: str) -> int:
        """Calls that ended with this status."""
        return sum(
            count
            for (_, ended), count in self.metrics.snapshot().grpc_server_handled_total.items()
            if ended == code
        )


@asynccontextmanager
async def real_service(
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    num_host_blocks: int = 0,
    max_model_len: int = 64,
    engine_options: EngineOptions = ENGINE_OPTIONS,
    policies: PolicySet | None = None,
    scheduler_class: Callable[..., Scheduler] = Scheduler,
    server_options: dict[str, Any] | None = None,
    metrics: Metrics | None = None,
    tracing: Tracing | None = None,
    tokenizer: Tokenizer = TOKENIZER,
    adapters: Adapters | None = None,
    **options: Any,
) -> AsyncIterator[RealService]:
    """options: SchedulerOptions by name."""
    clock = MonotonicClock()
    model = PagedModel(num_blocks, num_host_blocks, block_size)
    engine = make_engine(
        num_blocks=num_blocks,
        block_size=block_size,
        num_host_blocks=num_host_blocks,
        clock=clock,
        model=model,
        policies=policies,
        engine_options=engine_options,
        scheduler_class=scheduler_class,
        metrics=metrics,
        max_model_len=max_model_len,
        **options,
    )
    has_template = tokenizer.has_chat_template
    info = ModelInfo(
        "tiny",
        "here",
        "Fake",
        "fake",
        "float32",
        True,
        VOCAB_SIZE,
        max_model_len,
        2,
        1,
        3,
        0,
        (),
        has_template,
    )
    async_engine = AsyncEngine(
        engine,
        tokenizer,
        model=info,
        server_info=ServerInfo(
            *("1", 0.5, 0.0, block_size, num_blocks, 0, 1, 8, 16, "fake", Rates(), {}),
            fingerprint=SERVER_FINGERPRINT,
            exact_resume=True,
        ),
        scheduler_options=scheduler_options(max_model_len=max_model_len, **options),
        options=engine_options,
        clock=clock,
        random=Random(0),
        logger=recording_logger()[0],
        adapters=adapters,
    )
    if tracing is not None:
        scheduler = engine._scheduler
        assert isinstance(scheduler, Scheduler)
        scheduler.add_listener(PhaseRecorder(tracing.note_request, clock))
    await async_engine.start()
    try:
        async with serving(
            async_engine, metrics=engine.metrics, tracer=tracing, **(server_options or {})
        ) as served:
            service = RealService(
                async_engine,
                model,
                served.server,
                served.metrics,
                served.client,
                served.channel,
                f"127.0.0.1:{served.port}",
            )
            try:
                yield service
            finally:
                service.release_steps()
    finally:
        await async_engine.aclose()
