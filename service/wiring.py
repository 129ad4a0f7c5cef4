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
from typing import TYPE_CHECKING, TextIO, TypeVar

import torch
from pageturner.kernels.errors import KernelsUnavailable
from pageturner.kernels.layout import KvLayout
from pageturner.kernels.ops import PagedOps, select_ops
from pageturner.service import __version__
from pageturner.service.calibration import CPU_WORKLOAD, GPU_WORKLOAD, Machine, measure_rates
from pageturner.service.config import CacheConfig, LoadedConfig, ServiceConfig
from pageturner.service.core.clock import Clock
from pageturner.service.core.flight import Setting
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.recorder import RecordedScheduler, recorded_scheduler
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.engine.api import ModelInfo, ServerInfo
from pageturner.service.engine.async_engine import AsyncEngine
from pageturner.service.engine.engine import Engine
from pageturner.service.engine.flight_dumps import FlightDumps
from pageturner.service.engine.metrics import EngineMetrics
from pageturner.service.engine.recording import RecordedEngine, Recorder, RecordingScheduler
from pageturner.service.engine.text_output import TextOutput
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.errors import ConfigError, ModelError
from pageturner.service.model.artifacts import ModelArtifacts
from pageturner.service.model.backend import Backend, HeadShape, backend_of, choose_device
from pageturner.service.model.build import build_model
from pageturner.service.model.causal_model import CausalModel
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.model.loader import load_artifacts
from pageturner.service.model.options import ModelOptions
from pageturner.service.model.runner import Runner
from pageturner.service.model.sampler import Sampler
from pageturner.service.profile import run_largest_steps
from pageturner.service.rpc.server import Server
from pageturner.service.sizing import (
    fit_model_len,
    machine_memory,
    measure_memory,
    size_cache,
    size_gpu_cache,
)
from structlog.typing import FilteringBoundLogger

if TYPE_CHECKING:
    from pageturner.service.model.graphs import DecodeGraphs

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
    cache, kv_cache = _make_cache(
        config.cache, layout, ops, backend, partial(run_largest_steps, model, layout, ops, limits, sampler)
    )
    graphs = _decode_graphs(model, kv_cache, ops, backend, config.model, limits, logger)
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


def choose_backend(config: ServiceConfig, cache_dir: Path, logger: FilteringBoundLogger) -> Backend:
    """The device that the configuration chooses, and the operations for it. Raises ConfigError."""
    device, trouble = choose_device(config.model)
    if trouble is not None:
        level = logger.info if config.model.device == "auto" else logger.warning
        level("no_gpu", reason=trouble, device=str(device))

    def choose_ops(heads: HeadShape, dtype: torch.dtype) -> PagedOps:
        try:
            return select_ops(
                device,
                dtype,
                head_dim=heads.head_dim,
                block_size=config.cache.block_size,
                deterministic=config.model.deterministic,
                cache_dir=cache_dir,
                group=heads.num_heads // heads.num_kv_heads,
                allow_fallback=config.model.allow_fallback,
                debug=config.model.debug_kernels,
            )
        except KernelsUnavailable as reason:
            advice = "model.allow_fallback = true serves without the CUDA kernels, slower"
            raise ConfigError("model.device", f"{device}: {reason}; {advice}") from reason

    return backend_of(device, choose_ops)


def _make_cache(
    config: CacheConfig,
    layout: KvLayout,
    ops: PagedOps,
    backend: Backend,
    largest_steps: Callable[[], object],
) -> tuple[CacheOptions, KvCache]:
    """As large as was asked for, or as the memory beside the largest steps allows. Raises ConfigError."""
    if backend.meter is None:
        cache = size_cache(config, layout.block_bytes, machine_memory())
    else:
        memory = measure_memory(backend.meter, largest_steps)
        cache = size_gpu_cache(config, layout.block_bytes, memory, machine_memory())
    try:
        kv_cache = KvCache(
            layout, cache.num_blocks, cache.num_host_blocks, ops, backend.device, backend.streams
        )
    except MemoryError as error:
        raise ConfigError("cache.swap_space", str(error)) from error
    except torch.OutOfMemoryError as error:
        reason = f"{cache.num_blocks} blocks are no longer free on {backend.device}: {error}"
        raise ConfigError("cache.gpu_memory_utilization", reason) from error
    return cache, kv_cache


def _decode_graphs(
    model: CausalModel,
    kv_cache: KvCache,
    ops: PagedOps,
    backend: Backend,
    options: ModelOptions,
    limits: SchedulerOptions,
    logger: FilteringBoundLogger,
) -> DecodeGraphs | None:
    """Captured, where the backend captures and the operations have static plans."""
    if backend.graphs is None or not options.cuda_graphs:
        return None
    # Here, not above: serving on the CPU has no use for them.
    from pageturner.kernels.cuda.ops import CudaOps
    from pageturner.service.model.graphs import DecodeGraphs, graph_sizes

    if not isinstance(ops, CudaOps):
        logger.info("no_cuda_graphs", reason=f"the operations are {ops.name}'s")
        return None
    sizes = graph_sizes(min(options.cuda_graphs, limits.max_num_seqs))
    max_blocks = -(-limits.max_model_len // kv_cache.layout.block_size)
    graphs = DecodeGraphs(model, kv_cache, ops, backend.graphs, sizes, max_blocks)
    begin = time.perf_counter()
    if (reason := graphs.capture()) is not None:
        logger.warning("no_cuda_graphs", reason=reason)
        return None
    seconds = round(time.perf_counter() - begin, 2)
    logger.info("cuda_graphs", largest=sizes[-1], sizes=len(sizes), seconds=seconds)
    return graphs


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
