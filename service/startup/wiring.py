"""The composition root: a configuration becomes a service. Nobody else knows every room of the house."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import TextIO, TypeVar

import torch
from structlog.typing import FilteringBoundLogger

from pageturner.kernels.layout import KvLayout
from pageturner.service import __version__
from pageturner.service.config import LoadedConfig
from pageturner.service.core.clock import Clock
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.engine.api import ModelInfo, ServerInfo
from pageturner.service.engine.async_engine import AsyncEngine
from pageturner.service.engine.engine import Engine
from pageturner.service.engine.metrics import EngineMetrics
from pageturner.service.engine.text_output import TextOutput
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.errors import ModelError
from pageturner.service.flight.flight_dumps import FlightDumps
from pageturner.service.flight.recorded_scheduler import RecordedScheduler, recorded_scheduler
from pageturner.service.flight.recording import RecordedEngine, Recorder, RecordingScheduler
from pageturner.service.flight.records import Setting
from pageturner.service.model.artifacts import ModelArtifacts
from pageturner.service.model.backend import Backend
from pageturner.service.model.build import build_model
from pageturner.service.model.causal_model import CausalModel
from pageturner.service.model.loader import load_artifacts
from pageturner.service.model.options import ModelOptions
from pageturner.service.model.runner import Runner
from pageturner.service.model.sampler import Sampler
from pageturner.service.rpc.server import Server
from pageturner.service.startup.calibration import CPU_WORKLOAD, GPU_WORKLOAD, Machine, measure_rates
from pageturner.service.startup.placement import choose_backend, decode_graphs, make_cache
from pageturner.service.startup.profile import run_largest_steps
from pageturner.service.startup.sizing import fit_model_len

_Step = TypeVar("_Step")


@dataclass(frozen=True, slots=True)
class Service:
    """A loaded model behind a server, neither of them started."""

    engine: AsyncEngine
    server: Server


def build_service(
    loaded: LoadedConfig,
    cache_dir: Path,
    clock: Clock,
    started_at: float,
    logger: FilteringBoundLogger,
    recording: TextIO | None = None,
    backend: Backend | None = None,
) -> Service:
    """Load the model, size and fill the house. started_at: when the program began, on `clock`.
    recording: where what is asked and how long it takes is written, if anywhere. backend: where to compute,
    in place of what the configuration chooses.

    Raises ConfigError or ModelError.
    """
    config = loaded.config
    if config.model.num_threads is not None:
        torch.set_num_threads(config.model.num_threads)
    if backend is None:
        backend = choose_backend(config, cache_dir, logger)
    choose_ops = backend.choose_ops
    artifacts = load_artifacts(config.model, cache_dir)
    dtype: torch.dtype = getattr(torch, artifacts.dtype)
    try:
        model, ops = build_model(
            artifacts,
            config.model,
            config.cache.block_size,
            lambda heads: choose_ops(heads, dtype),
            backend.device,
        )
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{artifacts.name} does not fit on {backend.device}: {error}") from error
    layout = KvLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.cache.block_size,
        dtype=model.dtype,
        key_page=ops.key_page,
    )
    limits = fit_model_len(config.scheduler, model.max_position, loaded.origins)
    sampler = Sampler(model.vocab_size)
    cache, kv_cache = make_cache(
        config.cache, layout, ops, backend, partial(run_largest_steps, model, layout, ops, limits, sampler)
    )
    graphs = decode_graphs(model, kv_cache, ops, backend, config.model, limits, logger)
    runner = Runner(model, kv_cache, graphs)
    on_gpu = backend.device.type == "cuda"
    rates = measure_rates(
        Machine(
            forward=_finished(runner.forward, backend),
            apply=_finished(kv_cache.apply, backend),
            timer=time.perf_counter,
            block_size=cache.block_size,
            block_bytes=layout.block_bytes,
            num_blocks=cache.num_blocks,
            num_host_blocks=cache.num_host_blocks,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            workload=GPU_WORKLOAD if on_gpu else CPU_WORKLOAD,
        )
    )
    tokenizer = load_tokenizer(artifacts)
    policies, shadows = config.policies.create(), config.policies.create_shadows()
    # A secret of this process: nobody outside can craft a prompt whose digest meets another one.
    hash_key = secrets.token_bytes(16)
    make_scheduler: Callable[..., Scheduler] = Scheduler
    if recording is not None:
        described = RecordedEngine(artifacts.name, cache, limits, layout.block_bytes)
        recorder = Recorder(recording, described, secrets.token_bytes(16), logger)
        make_scheduler = partial(RecordingScheduler, recorder=recorder, clock=clock)
    scheduler = make_scheduler(
        limits, cache, policies, TextOutput(tokenizer), rates, hash_key=hash_key, shadows=shadows
    )
    flight = None
    recorded: Scheduler | RecordedScheduler = scheduler
    if config.engine.flight_recorder_steps:
        recorded = recorded_scheduler(
            scheduler,
            Setting(__version__, limits, cache, rates, depth=0),
            name_key=secrets.token_bytes(16),
            num_steps=config.engine.flight_recorder_steps,
        )
        prefix = f"flight-{os.getpid()}-{secrets.token_hex(4)}"
        flight = FlightDumps(recorded.recorder, cache_dir / "flight", prefix, logger)
    engine = AsyncEngine(
        Engine(
            recorded,
            kv_cache,
            runner,
            sampler,
            clock=clock,
            options=config.engine,
            metrics=EngineMetrics(),
            logger=logger,
            device=backend,
            on_fault=None if flight is None else flight.on_fault,
        ),
        tokenizer,
        model=describe_model(artifacts, model, config.model, limits, tokenizer),
        server_info=ServerInfo(
            version=__version__,
            start_seconds=clock.now() - started_at,
            uptime_seconds=0.0,
            block_size=cache.block_size,
            num_blocks=cache.num_blocks,
            num_host_blocks=cache.num_host_blocks,
            block_bytes=layout.block_bytes,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            kernels=ops.name,
            rates=rates,
            config=config.flat(),
            device=str(backend.device),
        ),
        max_n=limits.max_n,
        options=config.engine,
        clock=clock,
        random=SystemRandom(),
        logger=logger,
        flight=flight,
    )
    logger.info(
        "built",
        model=artifacts.name,
        forward=model.backend,
        kernels=ops.name,
        device=str(backend.device),
        dtype=artifacts.dtype,
        num_blocks=cache.num_blocks,
        num_host_blocks=cache.num_host_blocks,
        block_bytes=layout.block_bytes,
    )
    return Service(engine, Server(engine, config.server, logger, clock))


def _finished(step: Callable[[_Step], object], backend: Backend) -> Callable[[_Step], None]:
    """The step, and the wait for what it enqueued."""

    def run(given: _Step) -> None:
        step(given)
        backend.synchronize()

    return run


def load_tokenizer(artifacts: ModelArtifacts) -> Tokenizer | None:
    if artifacts.tokenizer_file is None:
        return None
    return Tokenizer.from_file(
        artifacts.tokenizer_file,
        chat_template=artifacts.chat_template,
        bos_token=artifacts.bos_token,
        eos_token=artifacts.eos_token,
        add_bos=artifacts.add_bos,
    )


def describe_model(
    artifacts: ModelArtifacts,
    model: CausalModel,
    options: ModelOptions,
    limits: SchedulerOptions,
    tokenizer: Tokenizer | None,
) -> ModelInfo:
    return ModelInfo(
        name=artifacts.name,
        source=artifacts.source,
        architecture=artifacts.architecture,
        backend=model.backend,
        dtype=artifacts.dtype,
        deterministic=options.deterministic,
        vocab_size=model.vocab_size,
        max_model_len=limits.max_model_len,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        num_parameters=model.num_parameters,
        eos_token_ids=artifacts.eos_token_ids,
        has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
    )
