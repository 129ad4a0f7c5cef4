"""The service on the GPU's path in bad weather: emulated kernels, replayed decode steps, swaps at the last
moment, clients that leave, deadlines, forks, shared prefixes, tiny pools, and a device that fails half-way.

Whatever a client was told is held against the model itself, asked once for the whole answer on torch's
operations: each token's log-probability there, where nothing was ever preempted, shared or cut in chunks.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.emulation import emulated_launcher
from support.lazy_streams import LazyStream, lazy_copies
from support.ops import cpu_cache_dir
from support.random_models import save, tiny_model
from support.scripted import recording_logger
from support.tape_graphs import TapeGraphs

from pageturner.kernels.cuda.ops import CudaOps
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.layout import KvLayout
from pageturner.kernels.torch_ops import TorchOps
from pageturner.service.config import LoadedConfig, load_config
from pageturner.service.core.clock import MonotonicClock
from pageturner.service.core.outputs import (
    SampledToken,
    ScheduledSequence,
    SchedulerOutput,
    TokenEvent,
)
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.engine.api import GenerationRequest
from pageturner.service.engine.async_engine import AsyncEngine
from pageturner.service.engine.metrics import Metrics
from pageturner.service.engine.step_computation import DirectSteps
from pageturner.service.errors import DeadlineExceeded, InvalidArgument, StepFailed
from pageturner.service.model.backend import Backend
from pageturner.service.model.batch import build_batch
from pageturner.service.model.build import build_model
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.model.loader import load_artifacts
from pageturner.service.startup.wiring import build_service

CPU = torch.device("cpu")
MAX_MODEL_LEN, BLOCK_SIZE, NUM_AT_ONCE = 112, 16, 6
WINDOWED = ("mistral_window",)
"""Families that give up the blocks behind the window of every layer, and so need fewer."""

TOLERANCE = 0.2
"""Of a log-probability: several times what bfloat16 leaves. A wrong key or value is off by more than 1."""
SHARED = [7 * i % 120 for i in range(60)]


class FaultyOps(CudaOps):
    """Operations of which some fail before, after, or (a swap) with their work enqueued all the same."""

    def __init__(self, launcher: Launcher, copies: LazyStream, random: Random) -> None:
        super().__init__(launcher)
        self._copies, self._random = copies, random
        self.rate = 0.0
        self.num_faults = 0

    def attention(self, *given: Any) -> torch.Tensor:
        self._fail_at_times()
        return super().attention(*given)

    def rope_and_write_kv(self, *given: Any) -> torch.Tensor:
        rotated = super().rope_and_write_kv(*given)
        self._fail_at_times()
        return rotated

    def copy_blocks(self, *given: Any) -> None:
        self._fail_at_times()
        super().copy_blocks(*given)
        self._fail_at_times()

    def _fail_at_times(self) -> None:
        if self._random.random() < self.rate:
            self.num_faults += 1
            if self._random.random() < 0.5:
                raise RuntimeError("the device refuses")
            self._copies.fail_after_next = True


@dataclass
class Storm:
    """told: prompt and what was streamed of one choice. refusals: of requests that ask too much."""

    random: Random
    refusals: list[str] = field(default_factory=list)
    told: list[tuple[list[int], list[SampledToken]]] = field(default_factory=list)

    async def squeeze(self, engine: AsyncEngine, seed: int) -> None:
        """Four blocks in the end, and nobody leaves: what runs at once needs more than any pool here."""
        prompt = [self.random.randrange(3, 120) for _ in range(33)]
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=30, ignore_eos=True, logprobs=0)
        await self._read(engine, prompt, GenerationRequest(tuple(prompt), params), math.inf)

    async def ask(self, engine: AsyncEngine, seed: int) -> None:
        """Something of any length, which its client may leave."""
        random = self.random
        length = random.choice((1, 15, 16, 17, 33, random.randrange(1, 100), MAX_MODEL_LEN - 2))
        prompt = [random.randrange(3, 120) for _ in range(length)]
        if random.random() < 0.5:
            prompt[: len(SHARED)] = SHARED[:length]
        params = SamplingParams(
            temperature=random.choice((0.0, 1.0)),
            seed=seed,
            n=random.choice((1, 1, 1, 2, 3)),
            max_tokens=min(random.choice((1, 5, 30)), MAX_MODEL_LEN - length),
            ignore_eos=True,
            logprobs=0,
        )
        deadline = random.uniform(0.05, 2.0) if random.random() < 0.15 else None
        patience = random.randrange(20) if random.random() < 0.3 else math.inf
        request = GenerationRequest(tuple(prompt), params, deadline_seconds=deadline)
        await self._read(engine, prompt, request, patience)

    async def _read(
        self, engine: AsyncEngine, prompt: list[int], request: GenerationRequest, patience: float
    ) -> None:
        streams: dict[int, list[SampledToken]] = defaultdict(list)
        try:
            stream = await engine.submit(request)
            try:
                async for event in stream:
                    if isinstance(event, TokenEvent):
                        streams[event.index].extend(event.tokens)
                    if sum(map(len, streams.values())) > patience:
                        break
            finally:
                await stream.aclose()
        except (DeadlineExceeded, StepFailed):
            pass
        except InvalidArgument as error:
            self.refusals.append(str(error))
        self.told += [(prompt, tokens) for tokens in streams.values()]


@torch.inference_mode()
def check_told(loaded: LoadedConfig, storm: Storm) -> int:
    """The number of tokens that were checked."""
    artifacts = load_artifacts(loaded.config.model, cpu_cache_dir())
    built = build_model(artifacts, loaded.config.model, BLOCK_SIZE, lambda heads: TorchOps(), CPU)
    model, ops = built.model, built.ops
    sizes = (model.num_layers, model.num_kv_heads, model.head_dim, BLOCK_SIZE)
    num_blocks = MAX_MODEL_LEN // BLOCK_SIZE
    cache = KvCache(KvLayout(*sizes, model.dtype, ops.key_order), num_blocks, 0, ops, CPU)
    count = 0
    for prompt, tokens in storm.told:
        ids = (*prompt, *(token.token_id for token in tokens))[:-1]
        table = tuple(range(-(-len(ids) // BLOCK_SIZE)))
        whole = ScheduledSequence(0, "", 0, ids, 0, 0, table, samples=())
        batch = build_batch(SchedulerOutput(step_id=0, scheduled=(whole,)), BLOCK_SIZE, CPU, lambda _: 0)
        rows = torch.arange(len(prompt) - 1, len(ids))
        logprobs = model.forward(replace(batch, logit_rows=rows), cache).float().log_softmax(-1)
        for row, token in zip(logprobs, tokens, strict=True):
            assert token.logprob == pytest.approx(float(row[token.token_id]), abs=TOLERANCE)
            count += 1
    return count


@pytest.mark.parametrize(
    ("seed", "num_blocks", "family"),
    [
        (42, 7, "llama"),
        *(
            pytest.param(seed, num_blocks, family, marks=pytest.mark.slow)
            for family in ("llama", "mistral_window", "qwen3", "gemma2")
            for seed, num_blocks in ((1, 7), (2, 9), (3, 8 if family in WINDOWED else 14))
        ),
    ],
)
async def test_statuses_that_clients_get_under_overload(
    seed: int, num_blocks: int, family: str, tmp_path: Path
) -> None:
    save(tiny_model(family, 5, head_dim=64)[1], tmp_path)
    random = Random(seed)
    flags = {
        "model.source": str(tmp_path),
        "model.device": "cpu",
        "model.dtype": "bfloat16",
        "model.num_threads": "1",
        "server.port": "0",
        "cache.num_blocks": str(num_blocks),
        "cache.swap_space": "16MiB",
        "scheduler.max_model_len": str(MAX_MODEL_LEN),
        "scheduler.max_num_batched_tokens": str(random.choice((7, 24, 64))),
        "scheduler.max_num_seqs": str(NUM_AT_ONCE),
        "policies.admission": "first-chunk",
        "policies.reclaim": "always-swap",
        "engine.max_consecutive_failures": "1000",
        "engine.flight_recorder_steps": "0",
    }
    loaded = load_config(None, {}, flags)
    streams, graphs = lazy_copies(), TapeGraphs(emulated_launcher().runtime)
    assert isinstance(streams.copies, LazyStream)
    ops = FaultyOps(Launcher(graphs.runtime), streams.copies, Random(seed))
    backend = Backend(
        CPU, lambda heads, dtype: ops, streams, synchronize=streams.copies.finish, graphs=graphs
    )
    clock = MonotonicClock()
    engine = build_service(
        loaded, cpu_cache_dir(), clock, clock.now(), recording_logger()[0], Metrics(), backend=backend
    )
    assert graphs.tapes
    ops.rate = 0.02
    storm = Storm(random)
    await engine.start()
    try:
        await asyncio.gather(
            *(storm.squeeze(engine, number) for number in range(NUM_AT_ONCE)),
            *(storm.ask(engine, number) for number in range(30)),
        )
    finally:
        await engine.aclose()
    steps = engine._engine._steps
    assert isinstance(steps, DirectSteps)
    scheduler, cache = engine._engine._scheduler, steps._kv_cache
    assert isinstance(scheduler, Scheduler)
    assert isinstance(cache, KvCache)
    scheduler.check_integrity()
    stats = scheduler.stats()
    assert (stats.num_blocks_used, stats.num_host_blocks_used) == (0, 0)
    assert stats.num_swapped_out_blocks_total > 0
    assert ops.num_faults > 0
    assert all("never fit" in refusal for refusal in storm.refusals)  # more choices than the pool holds
    ops.rate = 0.0
    streams.copies.finish()
    cache.fences.touch([])
    assert (cache.fences.num_events, cache.fences.fenced) == (0, [])
    assert check_told(loaded, storm) > 100
