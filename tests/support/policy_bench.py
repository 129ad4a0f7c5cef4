"""An asyncio engine over the real scheduler and the fake model, for tests that swap its policies."""

from __future__ import annotations

from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from pageturner.policies import registry
from pageturner.policies.views import Rates
from pageturner.service.core.clock import ManualClock
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.outputs import BlockCopies, SampledSequence, SchedulerOutput
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.engine.api import ModelInfo, ServerInfo
from pageturner.service.engine.async_engine import AsyncEngine
from pageturner.service.engine.engine import Engine
from pageturner.service.engine.metrics import Metrics
from pageturner.service.engine.options import EngineOptions
from pageturner.service.engine.step_computation import DirectSteps
from pageturner.service.engine.text_output import TextOutput
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.policy_host.calls import CallWatch
from support.fake_model import FakeModel
from support.scripted import recording_logger
from support.tiny_tokenizers import byte_level_bpe

NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE = 12, 6, 4
MODEL = ModelInfo("tiny", "here", "Fake", "fake", "float32", True, 500, 40, 2, 1, 3, 0, (), False)
SERVER = ServerInfo("1", 0.5, 0.0, BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS, 1, 6, 16, "torch", Rates(), {})
OPTIONS = EngineOptions(stream_buffer_tokens=64)


class _Model:
    """The fake model behind the engine's three interfaces."""

    def __init__(self) -> None:
        self._model = FakeModel(NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE)

    def apply(self, copies: BlockCopies) -> None:
        self._model.kv_cache.apply(copies)

    def forward(self, output: SchedulerOutput) -> SchedulerOutput:
        return output

    def note_sampled(self, sampled: tuple[SampledSequence, ...]) -> None:
        """Nothing: the fake model knows what it sampled."""

    def sample(self, logits: SchedulerOutput, output: SchedulerOutput) -> tuple[SampledSequence, ...]:
        return self._model.compute(output)


@dataclass(frozen=True, slots=True)
class PolicyBench:
    """scheduler: to look at once the engine rests. log: what the engine wrote. clock: times policies too."""

    engine: AsyncEngine
    scheduler: Scheduler
    log: list[MutableMapping[str, Any]]
    clock: ManualClock


@asynccontextmanager
async def policy_bench(max_policy_faults: int = 100) -> AsyncIterator[PolicyBench]:
    tokenizer, clock = Tokenizer(byte_level_bpe()), ManualClock(100.0)
    logger, log = recording_logger()
    options = SchedulerOptions(
        max_model_len=40, max_num_seqs=6, max_num_batched_tokens=16, max_policy_faults=max_policy_faults
    )
    scheduler = Scheduler(
        options,
        CacheOptions(NUM_BLOCKS, BLOCK_SIZE, NUM_HOST_BLOCKS),
        registry.default_policies(),
        TextOutput(tokenizer),
        Rates(),
        hash_key=b"test",
        watch=CallWatch(clock.now, escapes=()),
    )
    model = _Model()
    engine = AsyncEngine(
        Engine(
            scheduler,
            DirectSteps(model, model, model),
            clock=clock,
            options=OPTIONS,
            metrics=Metrics(),
            logger=logger,
        ),
        tokenizer,
        model=MODEL,
        server_info=SERVER,
        scheduler_options=options,
        options=OPTIONS,
        clock=clock,
        random=Random(0),
        logger=logger,
    )
    await engine.start()
    try:
        yield PolicyBench(engine, scheduler, log, clock)
    finally:
        await engine.aclose()
