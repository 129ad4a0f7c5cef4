"""The composition root: a configuration becomes a service. No other module knows all packages.

Four steps, each usable by itself: `load_model` (loading.py), `build_scheduler`, `build_engine`, and
`build_service`, which is all of them. The server (`rpc.server`) is started before, and attached to it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import SystemRandom

from structlog.typing import FilteringBoundLogger

from pageturner import __version__
from pageturner.service.config import CacheConfig, LoadedConfig, ServiceConfig
from pageturner.service.core.clock import Clock
from pageturner.service.core.memory.prefix_cache import MIN_KEY_BYTES, prefix_key
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.engine.api import MeasuredProducts, ProductsInfo, ServerInfo
from pageturner.service.engine.async_engine import AsyncEngine
from pageturner.service.engine.engine import Engine
from pageturner.service.engine.fingerprint import Fingerprint
from pageturner.service.engine.lower_tier import LowerTier
from pageturner.service.engine.metrics import Metrics
from pageturner.service.engine.step_computation import DirectSteps, StepComputation, ThreadedSteps
from pageturner.service.engine.text_output import TextOutput
from pageturner.service.errors import ConfigError
from pageturner.service.flight.dumps import FlightDumps
from pageturner.service.flight.phases import PhaseRecorder, RequestPhases
from pageturner.service.flight.recorder import FlightRecorder
from pageturner.service.flight.recording import LineFile, RecordedEngine, WorkloadRecorder
from pageturner.service.flight.records import Setting
from pageturner.service.grammars.grammars import Grammars
from pageturner.service.model.backend import Backend
from pageturner.service.model.decoder import Decoder
from pageturner.service.model.kv_dtypes import name_of
from pageturner.service.model.product_choice import ProductChoice
from pageturner.service.model.step_runner import StepRunner
from pageturner.service.policy_host.calls import CallWatch
from pageturner.service.ranks.ranked_steps import RankedSteps
from pageturner.service.startup.adapters import build_adapters
from pageturner.service.startup.fingerprint import describe_fingerprint
from pageturner.service.startup.handover import build_handover, layout_of, open_handover
from pageturner.service.startup.loading import LoadedModel, describe_model, load_model
from pageturner.service.startup.stages import OnStage, unheard
from pageturner.service.startup.tiers import OpenedDisk, open_disk, tie_tier


def build_service(
    loaded: LoadedConfig,
    cache_dir: Path,
    clock: Clock,
    started_at: float,
    logger: FilteringBoundLogger,
    metrics: Metrics,
    recording: LineFile | None = None,
    backend: Backend | None = None,
    on_stage: OnStage = unheard,
    on_phases: Callable[[RequestPhases], None] | None = None,
) -> AsyncEngine:
    """Load the model and build its engine, not started. started_at: when the program began, on `clock`.
    recording: where `serve --record` writes, if anywhere. backend: where to compute, in place of what the
    configuration chooses. on_stage: told of each part. on_phases: told of each traced request at its end.

    Raises ConfigError or ModelError.
    """
    model = load_model(loaded, cache_dir, logger, backend, on_stage)
    return build_engine(
        loaded.config, model, cache_dir, clock, started_at, logger, metrics, recording, on_phases
    )


def build_engine(
    config: ServiceConfig,
    model: LoadedModel,
    cache_dir: Path,
    clock: Clock,
    started_at: float,
    logger: FilteringBoundLogger,
    metrics: Metrics,
    recording: LineFile | None = None,
    on_phases: Callable[[RequestPhases], None] | None = None,
) -> AsyncEngine:
    """The engine of a loaded model, not started. The arguments are those of `build_service`. Where it raises,
    the model's ranks have ended."""
    depth, fingerprint = _depth(config, model), describe_fingerprint(model)
    with ExitStack() as opened:  # what runs by then ends if the rest cannot be built
        steps = _steps(model, depth, logger)
        opened.callback(steps.close)
        model, disk = open_disk(config.cache, model, fingerprint.text, logger)
        if disk is not None:
            opened.callback(disk.tier.close)
        model, handover = open_handover(config, model, logger)
        if handover.tier is not None:
            opened.callback(handover.tier.close)
        scheduler, flight = build_scheduler(
            config, model, cache_dir, clock, logger, recording, depth=depth, disk=disk, peer=handover.tier
        )
        hasher = scheduler.manager.hasher
        tier = handover.tier if disk is None else disk.tier
        if on_phases is not None:
            scheduler.add_listener(PhaseRecorder(on_phases, clock))
        engine = AsyncEngine(
            Engine(
                scheduler,
                steps,
                clock=clock,
                options=config.engine,
                metrics=metrics,
                logger=logger,
                depth=depth,
                device=model.backend,
                on_fault=None if flight is None else flight.on_fault,
                tiers=None if tier is None else tie_tier(tier, scheduler, model.kv_cache, logger),
            ),
            model.tokenizer,
            model=describe_model(model),
            server_info=_describe_server(config, model, fingerprint, start_seconds=clock.now() - started_at),
            scheduler_options=model.limits,
            options=config.engine,
            clock=clock,
            random=SystemRandom(),
            logger=logger,
            flight=flight,
            shares_prefixes=config.cache.share_prefixes_between_tenants,
            grammars=model.grammars,
            adapters=build_adapters(model, config.adapters, logger),
            ranks=None if model.ranks is None else model.ranks.leader,
            hasher=hasher,
            handover=(
                None
                if hasher is None
                else build_handover(handover, model, hasher, fingerprint.text, clock, logger)
            ),
            sender=handover.sender,
            layout=layout_of(model),
            allow_inexact_handover=config.handover.allow_inexact,
        )
        opened.pop_all()
    logger.info(
        "built",
        model=model.artifacts.name,
        forward=model.model.backend,
        kernels=model.ops.name,
        device=str(model.backend.device),
        dtype=model.artifacts.dtype,
        products=model.products.name,
        kv_dtype=name_of(model.model.kv_dtype),
        deterministic=model.deterministic,
        num_blocks=model.cache.num_blocks,
        num_host_blocks=model.cache.num_host_blocks,
        block_bytes=model.block_bytes,
    )
    return engine


def build_scheduler(
    config: ServiceConfig,
    model: LoadedModel,
    cache_dir: Path,
    clock: Clock,
    logger: FilteringBoundLogger,
    recording: LineFile | None = None,
    *,
    depth: int = 0,
    disk: OpenedDisk | None = None,
    peer: LowerTier | None = None,
) -> tuple[Scheduler, FlightDumps | None]:
    """The scheduler, recorded as configured, and the dumps of the flight recorder if it is on. peer: what
    stands in the place of a disk where blocks are handed over."""
    scheduler = Scheduler(
        model.limits,
        model.cache,
        config.policies.create(),
        TextOutput(model.tokenizer),
        model.rates,
        depth=depth,
        hash_key=_hash_key(config.cache, disk),
        shadows=config.policies.create_shadows(),
        watch=CallWatch(time.perf_counter, escapes=()),
        speculation=model.speculation,
        disk=peer if disk is None else disk.tier,
    )
    if recording is not None:
        engine = RecordedEngine(
            model.artifacts.name, model.cache, model.limits, model.block_bytes, model.rates
        )
        WorkloadRecorder(scheduler, recording, engine, secrets.token_bytes(16), clock)
    if not config.engine.flight_recorder_steps:
        return scheduler, None
    recorder = FlightRecorder(
        scheduler,
        Setting(__version__, model.limits, model.cache, model.rates, depth, model.speculation),
        config.engine.flight_recorder_steps,
    )
    prefix = f"flight-{os.getpid()}-{secrets.token_hex(4)}"
    return scheduler, FlightDumps(recorder.record, cache_dir / "flight", prefix, clock, logger)


def _hash_key(config: CacheConfig, disk: OpenedDisk | None) -> bytes:
    """A secret of this process, of the folder of its blocks, or of all who have its file: no client can craft
    a prompt whose hash equals another prompt's, and no reader of a record can find out what a block says.

    Raises ConfigError for a file that can't be read, or is too short for a secret.
    """
    if config.prefix_key_file is None:
        return secrets.token_bytes(16) if disk is None else disk.key
    try:
        content = config.prefix_key_file.read_bytes()
    except OSError as error:
        raise ConfigError("cache.prefix_key_file", f"can't be read: {error}") from error
    if len(content) < MIN_KEY_BYTES:
        reason = f"{config.prefix_key_file} has {len(content)} bytes, fewer than {MIN_KEY_BYTES}: no secret"
        raise ConfigError("cache.prefix_key_file", reason)
    return prefix_key(content)


def _steps(model: LoadedModel, depth: int, logger: FilteringBoundLogger) -> StepComputation:
    """Where steps are computed: in a thread of their own on a CPU that is to plan one meanwhile."""
    steps: StepComputation = DirectSteps(model.kv_cache, StepRunner(model.runner), model.sampler, model.masks)
    if model.ranks is not None:
        steps = RankedSteps(steps, model.ranks)
    if not depth or model.backend.device.type != "cpu":
        return steps
    try:
        return ThreadedSteps(steps)
    except RuntimeError as error:
        logger.warning("no_thread_for_steps", reason=f"{error}; the engine computes them in its own")
        return steps


def _depth(config: ServiceConfig, model: LoadedModel) -> int:
    """Steps in flight while one is planned: as configured, else one on a GPU and none on a CPU.

    None with speculation: drafts follow a token that a step ahead does not know.
    """
    configured = config.engine.steps_ahead
    if configured is not None:
        return configured
    if config.speculation.method != "none":
        return 0
    return 0 if model.backend.device.type == "cpu" else 1


def _describe_server(
    config: ServiceConfig, model: LoadedModel, fingerprint: Fingerprint, start_seconds: float
) -> ServerInfo:
    return ServerInfo(
        version=__version__,
        start_seconds=start_seconds,
        uptime_seconds=0.0,
        block_size=model.cache.block_size,
        num_blocks=model.cache.num_blocks,
        num_host_blocks=model.cache.num_host_blocks,
        block_bytes=model.block_bytes,
        max_num_seqs=model.limits.max_num_seqs,
        max_num_batched_tokens=model.limits.max_num_batched_tokens,
        kernels=model.ops.name,
        rates=model.rates,
        config=config.flat(),
        device=str(model.backend.device),
        products=_describe_products(model.products),
        model_name=model.artifacts.name,
        fingerprint=fingerprint.text,
        exact_resume=fingerprint.is_exact,
        speculation=model.speculation,
        kv_dtype=name_of(model.model.kv_dtype),
        num_host_cache_blocks=model.cache.num_host_cache_blocks,
        num_disk_cache_blocks=model.cache.num_disk_cache_blocks,
        structured_output=model.grammars.identity if isinstance(model.grammars, Grammars) else "",
        adapter_memory_bytes=int(config.adapters.memory) if isinstance(model.model, Decoder) else 0,
        max_adapter_rank=config.adapters.max_rank if isinstance(model.model, Decoder) else 0,
        sliding_window=model.cache.window or 0,
        tensor_parallel_size=1 if model.ranks is None else model.ranks.leader.size,
    )


def _describe_products(choice: ProductChoice) -> ProductsInfo:
    measured = tuple(MeasuredProducts(each.name, each.seconds, each.mean_kl) for each in choice.measured)
    return ProductsInfo(choice.name, choice.reason, measured, choice.warning or "")
