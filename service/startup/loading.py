"""Loads the model onto its device and gives it the memory that it decodes into."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from structlog.typing import FilteringBoundLogger

from pageturner.kernels.interface import PagedOps
from pageturner.kernels.layout import KvLayout
from pageturner.policies.views import Rates
from pageturner.service.config import LoadedConfig
from pageturner.service.core.options import NO_SPECULATION, CacheOptions, SchedulerOptions, SpeculationOptions
from pageturner.service.engine.api import ModelInfo
from pageturner.service.engine.chat_template import ChatTemplate
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.errors import ModelError
from pageturner.service.grammars.grammars import Grammars, Unavailable
from pageturner.service.grammars.step_masks import StepMasks
from pageturner.service.model.adapter_store import AdapterStore
from pageturner.service.model.artifacts import ModelArtifacts
from pageturner.service.model.backend import Backend
from pageturner.service.model.build import BuiltModel, build_model
from pageturner.service.model.causal_model import CausalModel
from pageturner.service.model.cpu_features import read_cpuinfo
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.model.loader import load_artifacts
from pageturner.service.model.options import ModelOptions
from pageturner.service.model.product_choice import ProductChoice
from pageturner.service.model.runner import Runner
from pageturner.service.model.sampler import Sampler
from pageturner.service.model.tensor_parallel.collectives import ALONE, Collectives
from pageturner.service.sizes import format_size
from pageturner.service.startup.calibration import (
    CPU_WORK,
    GPU_WORK,
    CalibrationTarget,
    measure_rates,
    measure_row_cost,
)
from pageturner.service.startup.container import (
    anonymous_memory,
    machine_memory,
    own_processors,
    processor_limit,
    usable_processors,
)
from pageturner.service.startup.grammars import make_grammars
from pageturner.service.startup.placement import choose_backend, decode_graphs, make_cache
from pageturner.service.startup.products import Machine, settle_products
from pageturner.service.startup.profile import run_largest_steps
from pageturner.service.startup.sizing import HostMemory, fit_model_len
from pageturner.service.startup.stages import OnStage, unheard

_Step = TypeVar("_Step")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device with its KV cache: all that a step computes with.

    limits: as configured, with max_model_len as the model allows. rates: measured on this machine.
    tokenizer: None for a model that has none. products: what its matrix products are computed with, and why.
    deterministic: whether a row's bits are promised not to depend on its batch. speculation: as configured,
    with the cost of a row as it was measured. grammars, masks: by which the sampler obeys
    the forms that requests ask for. adapters: that the runner finds.
    """

    artifacts: ModelArtifacts
    backend: Backend
    model: CausalModel
    ops: PagedOps
    limits: SchedulerOptions
    cache: CacheOptions
    kv_cache: KvCache
    runner: Runner
    sampler: Sampler
    rates: Rates
    tokenizer: Tokenizer | None
    products: ProductChoice
    deterministic: bool
    grammars: Grammars | Unavailable
    masks: StepMasks | None
    adapters: AdapterStore
    speculation: SpeculationOptions = NO_SPECULATION

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the KV cache over all layers."""
        return self.kv_cache.layout.block_bytes


def load_model(
    loaded: LoadedConfig,
    cache_dir: Path,
    logger: FilteringBoundLogger,
    backend: Backend | None = None,
    on_stage: OnStage = unheard,
    collectives: Collectives = ALONE,
) -> LoadedModel:
    """Load weights and tokenizer, size the KV cache, measure the machine.

    cache_dir: where converted weights and compiled kernels are kept. backend: where to compute, in place of
    what the configuration chooses. on_stage: told of each part. collectives: with the ranks that hold the
    other shards. Raises ConfigError or ModelError.
    """
    config = loaded.config
    _choose_threads(config.model, logger)
    if not make_folder(cache_dir):
        advice = "XDG_CACHE_HOME names another folder; without one nothing is converted or compiled"
        logger.warning("cache_not_writable", path=str(cache_dir), advice=advice)
    if backend is None:
        backend = choose_backend(config, cache_dir, logger)
    machine = Machine(read_cpuinfo(), machine_memory())
    settled = settle_products(config.model, config.cache.block_size, backend, cache_dir, machine, logger)
    on_stage("device and products")
    before_loading = anonymous_memory()
    artifacts = settled.artifacts or load_artifacts(settled.options, cache_dir)
    on_stage("model files and tokenizer")
    built = _place_weights(artifacts, settled.options, config.cache.block_size, backend, collectives)
    model, ops = built.model, built.ops
    if built.note is not None:
        logger.warning("not_deterministic", reason=built.note)
    on_stage("weights and kernels")
    layout = KvLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.cache.block_size,
        dtype=model.kv_dtype,
        key_order=ops.key_order,
    )
    limits = fit_model_len(config.scheduler, model.max_position, loaded.origins)
    sampler = Sampler(model.vocab_size)
    largest_steps = partial(run_largest_steps, model, layout, ops, limits, sampler)
    memory = _host_memory(before_loading, model, backend)
    cache, kv_cache = make_cache(config.cache, layout, ops, backend, largest_steps, memory, loaded.origins)
    if model.window is not None and model.window < limits.max_model_len and not cache.num_host_cache_blocks:
        cache = replace(cache, window=model.window)
        logger.info("sliding_window", keys=model.window, max_model_len=limits.max_model_len)
    num_swap_blocks = cache.num_host_blocks - cache.num_host_cache_blocks
    if num_swap_blocks < config.cache.swap_space // layout.block_bytes:
        swap_space = format_size(num_swap_blocks * layout.block_bytes)
        logger.warning("swap_space_reduced", swap_space=swap_space, reason=memory.figures())
    graphs = decode_graphs(model, kv_cache, ops, backend, config.model, limits, logger)
    adapters = AdapterStore()
    runner = Runner(model, kv_cache, graphs, adapters)
    on_stage("KV cache")
    target = _calibration_target(runner, kv_cache, cache, limits, backend)
    rates, speculation = measure_rates(target), config.speculation
    if speculation.method != "none" and speculation.row_cost is None:
        speculation = replace(speculation, row_cost=measure_row_cost(target))
    on_stage("warm-up and rates")
    tokenizer = load_tokenizer(artifacts)
    grammars = make_grammars(config.grammars, tokenizer, model.vocab_size)
    masks = StepMasks(grammars, time.perf_counter) if isinstance(grammars, Grammars) else None
    report_model_files(artifacts, model.vocab_size, tokenizer, logger)
    return LoadedModel(
        artifacts,
        backend,
        model,
        ops,
        limits,
        cache,
        kv_cache,
        runner,
        Sampler(model.vocab_size, masks),
        rates,
        tokenizer,
        replace(settled.choice, name=artifacts.dtype) if artifacts.packed is None else settled.choice,
        built.deterministic,
        grammars,
        masks,
        adapters,
        speculation,
    )


def _choose_threads(options: ModelOptions, logger: FilteringBoundLogger) -> None:
    """As many as configured, or torch's choice within the processors that are this process's to run on."""
    default, own, limit = torch.get_num_threads(), own_processors(), processor_limit()
    num_threads = options.num_threads or usable_processors(min(default, own), limit)
    if num_threads != default:
        torch.set_num_threads(num_threads)
    logger.info(
        "threads", num_threads=num_threads, torch_default=default, processors=own, processor_quota=limit
    )


def _host_memory(before_loading: int, model: CausalModel, backend: Backend) -> HostMemory:
    """before_loading: bytes that the process had before it loaded the model."""
    weights = 0 if backend.device.type == "cuda" else model.weight_bytes
    # Weights that are mapped from a file take memory when they are first read.
    loaded = max(anonymous_memory() - before_loading, weights)
    return HostMemory(machine_memory(), before_loading + loaded)


def make_folder(folder: Path) -> bool:
    """Make the folder, if it is not there; whether files can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _place_weights(
    artifacts: ModelArtifacts,
    options: ModelOptions,
    block_size: int,
    backend: Backend,
    collectives: Collectives,
) -> BuiltModel:
    dtype: torch.dtype = getattr(torch, artifacts.dtype)
    try:
        return build_model(
            artifacts,
            options,
            block_size,
            lambda heads: backend.choose_ops(heads, dtype),
            backend.device,
            backend.quantised,
            collectives,
        )
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{artifacts.name} does not fit on {backend.device}: {error}") from error


def _calibration_target(
    runner: Runner, kv_cache: KvCache, cache: CacheOptions, limits: SchedulerOptions, backend: Backend
) -> CalibrationTarget:
    return CalibrationTarget(
        forward=_finished(runner.forward, backend),
        apply=_finished(kv_cache.apply, backend),
        timer=time.perf_counter,
        block_size=cache.block_size,
        block_bytes=kv_cache.layout.block_bytes,
        num_blocks=cache.num_blocks,
        num_host_blocks=cache.num_host_blocks,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        work=GPU_WORK if backend.device.type == "cuda" else CPU_WORK,
    )


def _finished(step: Callable[[_Step], object], backend: Backend) -> Callable[[_Step], None]:
    """The step, and the wait for what it enqueued."""

    def run(given: _Step) -> None:
        step(given)
        backend.synchronize()

    return run


def load_tokenizer(artifacts: ModelArtifacts) -> Tokenizer | None:
    """The tokenizer of a model, None for one of token ids. Raises ModelError for a template that does not
    compile."""
    if artifacts.tokenizer is None:
        return None
    template = artifacts.chat_template
    return Tokenizer(
        artifacts.tokenizer,
        chat_template=ChatTemplate(template, artifacts.special_tokens) if template else None,
        named_templates={
            name: ChatTemplate(source, artifacts.special_tokens)
            for name, source in artifacts.named_templates.items()
        },
        bos_token=artifacts.bos_token,
        add_bos=artifacts.add_bos,
    )


def report_model_files(
    artifacts: ModelArtifacts, vocab_size: int, tokenizer: Tokenizer | None, logger: FilteringBoundLogger
) -> None:
    """Say what of the model's files an operator should know, one warning each. vocab_size: its embeddings."""
    for note in artifacts.notes:
        logger.warning("model_files", reason=note)
    if beyond := [end for end in artifacts.eos_token_ids if end >= vocab_size]:
        reason = f"end tokens {beyond} are beyond the model's {vocab_size} embeddings, and left out"
        logger.warning("model_files", reason=reason)
    if tokenizer is not None and tokenizer.max_id >= vocab_size:
        reason = (
            f"the tokenizer's ids go up to {tokenizer.max_id}, the model has {vocab_size} embeddings; "
            "prompts that hold a token beyond them are refused"
        )
        logger.warning("model_files", reason=reason)


def describe_model(loaded: LoadedModel) -> ModelInfo:
    """What clients are told about the model."""
    artifacts, model, tokenizer = loaded.artifacts, loaded.model, loaded.tokenizer
    return ModelInfo(
        name=artifacts.name,
        source=artifacts.source,
        architecture=artifacts.architecture,
        backend=model.backend,
        dtype=artifacts.dtype,
        deterministic=loaded.deterministic,
        vocab_size=model.vocab_size,
        max_model_len=loaded.limits.max_model_len,
        num_layers=model.num_layers,
        num_kv_heads=model.total_kv_heads,
        head_dim=model.head_dim,
        num_parameters=model.num_parameters,
        eos_token_ids=tuple(end for end in artifacts.eos_token_ids if end < model.vocab_size),
        has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
        quantization=loaded.products.name if artifacts.packed is not None else "none",
    )
