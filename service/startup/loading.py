"""Loads the model onto its device and gives it the memory that it decodes into."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from pageturner.kernels.interface import PagedOps
from pageturner.policies.views import Rates
from pageturner.service.config import LoadedConfig
from pageturner.service.core.options import NO_SPECULATION, CacheOptions, SchedulerOptions, SpeculationOptions
from pageturner.service.engine.api import ModelInfo
from pageturner.service.engine.chat_template import ChatTemplate
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.grammars.grammars import Grammars, Unavailable
from pageturner.service.grammars.step_masks import StepMasks
from pageturner.service.model.adapter_store import AdapterStore
from pageturner.service.model.artifacts import ModelArtifacts
from pageturner.service.model.backend import Backend
from pageturner.service.model.causal_model import CausalModel
from pageturner.service.model.cpu_features import read_cpuinfo
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.model.loader import load_artifacts
from pageturner.service.model.product_choice import ProductChoice
from pageturner.service.model.runner import Runner
from pageturner.service.model.sampler import Sampler
from pageturner.service.ranks.ranked_steps import Ranks
from pageturner.service.startup.calibration import (
    CPU_WORK,
    GPU_WORK,
    CalibrationTarget,
    measure_rates,
    measure_row_cost,
    measure_scored_row_cost,
)
from pageturner.service.startup.container import anonymous_memory, machine_memory
from pageturner.service.startup.grammars import make_grammars
from pageturner.service.startup.parts import NO_PEERS, LoadedPart, choose_threads, finished, load_part
from pageturner.service.startup.placement import choose_backend
from pageturner.service.startup.products import Machine, settle_products
from pageturner.service.startup.ranks import LeadingPeers, started_ranks
from pageturner.service.startup.stages import OnStage, unheard


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device with its KV cache: all that a step computes with.

    limits: as configured, with max_model_len as the model allows. rates: measured on this machine.
    tokenizer: None for a model that has none. products: what its matrix products are computed with, and why.
    deterministic: whether a row's bits are promised not to depend on its batch. speculation: as configured,
    with the cost of a row as it was measured. grammars, masks: by which the sampler obeys
    the forms that requests ask for. adapters: that the runner finds. ranks: None where the model is whole on
    this one, else all, of which this is rank 0: model and KV cache are its part.
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
    ranks: Ranks | None = None

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
) -> LoadedModel:
    """Load weights and tokenizer, size the KV cache, measure the machine.

    cache_dir: where converted weights and compiled kernels are kept. backend: where to compute, in place of
    what the configuration chooses. on_stage: told of each part. Raises ConfigError or ModelError.
    """
    config = loaded.config
    choose_threads(config.model, logger)
    if not make_folder(cache_dir):
        advice = "XDG_CACHE_HOME names another folder; without one nothing is converted or compiled"
        logger.warning("cache_not_writable", path=str(cache_dir), advice=advice)
    if backend is None:
        backend = choose_backend(config, cache_dir, logger)
    if config.model.tensor_parallel_size == 1:
        return _load(loaded, cache_dir, logger, backend, on_stage)
    with started_ranks(config.model, backend, logger) as peers:
        return _load(loaded, cache_dir, logger, backend, on_stage, peers)


def _load(
    loaded: LoadedConfig,
    cache_dir: Path,
    logger: FilteringBoundLogger,
    backend: Backend,
    on_stage: OnStage,
    peers: LeadingPeers | None = None,
) -> LoadedModel:
    """peers: whose processes have just been started; None where there is no other rank."""
    config = loaded.config
    machine = Machine(read_cpuinfo(), machine_memory())
    settled = settle_products(config.model, config.cache.block_size, backend, cache_dir, machine, logger)
    on_stage("device and products")
    before_loading = anonymous_memory()
    artifacts = settled.artifacts or load_artifacts(settled.options, cache_dir)
    on_stage("model files and tokenizer")
    if peers is not None:
        peers.meet(loaded, settled.options, artifacts, backend, cache_dir)
    part = load_part(
        loaded, settled.options, artifacts, backend, before_loading, logger, peers or NO_PEERS, on_stage
    )
    model, ranks = part.model, None if peers is None else peers.ready()
    target = _calibration_target(part, backend, ranks)
    rates, speculation = measure_rates(target), config.speculation
    if speculation.method != "none" and speculation.row_cost is None:
        speculation = replace(speculation, row_cost=measure_row_cost(target))
    limits = part.limits
    if limits.scored_row_cost is None:
        limits = replace(limits, scored_row_cost=measure_scored_row_cost(target))
    if ranks is not None:
        ranks.begin()
    on_stage("warm-up and rates")
    tokenizer = load_tokenizer(artifacts)
    grammars = make_grammars(config.grammars, tokenizer, model.vocab_size)
    masks = StepMasks(grammars, time.perf_counter) if isinstance(grammars, Grammars) else None
    report_model_files(artifacts, model.vocab_size, tokenizer, logger)
    return LoadedModel(
        artifacts,
        backend,
        model,
        part.ops,
        limits,
        part.cache,
        part.kv_cache,
        part.runner,
        Sampler(model.vocab_size, masks),
        rates,
        tokenizer,
        replace(settled.choice, name=artifacts.dtype) if artifacts.packed is None else settled.choice,
        part.deterministic,
        grammars,
        masks,
        part.adapters,
        speculation,
        ranks,
    )


def make_folder(folder: Path) -> bool:
    """Make the folder, if it is not there; whether files can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _calibration_target(part: LoadedPart, backend: Backend, ranks: Ranks | None) -> CalibrationTarget:
    forward, apply = finished(part.runner.step, backend), finished(part.kv_cache.apply, backend)
    return CalibrationTarget(
        forward=forward if ranks is None else ranks.together(forward),
        apply=apply if ranks is None else ranks.copying(apply),
        timer=time.perf_counter,
        block_size=part.cache.block_size,
        block_bytes=part.kv_cache.layout.block_bytes,
        num_blocks=part.cache.num_blocks,
        num_host_blocks=part.cache.num_host_blocks,
        max_num_batched_tokens=part.limits.max_num_batched_tokens,
        max_model_len=part.limits.max_model_len,
        work=GPU_WORK if backend.device.type == "cuda" else CPU_WORK,
    )


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
