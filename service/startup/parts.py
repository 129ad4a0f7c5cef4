"""What one rank of a model computes with: its part of the weights, its KV cache, its runner.

A model that is whole on one rank is loaded the same way. Every rank of one that is not does all of this at
the same time and in the same order: probes run steps of the model, which all ranks compute together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from structlog.typing import FilteringBoundLogger

from pageturner.kernels.interface import PagedOps
from pageturner.kernels.layout import KvLayout
from pageturner.service.config import LoadedConfig
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.errors import ModelError
from pageturner.service.model.adapter_store import AdapterStore
from pageturner.service.model.artifacts import ModelArtifacts
from pageturner.service.model.backend import Backend
from pageturner.service.model.build import BuiltModel, build_model
from pageturner.service.model.causal_model import CausalModel
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.model.options import ModelOptions
from pageturner.service.model.runner import Runner
from pageturner.service.model.sampler import Sampler
from pageturner.service.model.tensor_parallel.collectives import ALONE, Collectives
from pageturner.service.sizes import format_size
from pageturner.service.startup.container import (
    anonymous_memory,
    machine_memory,
    own_processors,
    processor_limit,
    usable_processors,
)
from pageturner.service.startup.placement import decode_graphs, make_cache, unanimous
from pageturner.service.startup.profile import run_largest_steps
from pageturner.service.startup.sizing import HostMemory, fit_model_len, share_of
from pageturner.service.startup.stages import OnStage, unheard

_Step = TypeVar("_Step")


class Peers(Protocol):
    """The other ranks, as one rank knows them while its part is loaded."""

    @property
    def collectives(self) -> Collectives:
        """With all ranks."""
        ...

    def agree(self, cache: CacheOptions) -> CacheOptions:
        """Sizes that fit on all ranks, of those that fit here."""
        ...


@dataclass(frozen=True, slots=True)
class NoPeers:
    """Those of a model that is whole on one rank."""

    collectives: Collectives = ALONE

    def agree(self, cache: CacheOptions) -> CacheOptions:
        return unanimous(cache)


NO_PEERS = NoPeers()


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """limits: as configured, with max_model_len as the model allows. deterministic: whether a row's bits are
    promised not to depend on its batch."""

    model: CausalModel
    ops: PagedOps
    deterministic: bool
    limits: SchedulerOptions
    cache: CacheOptions
    kv_cache: KvCache
    runner: Runner
    adapters: AdapterStore


def load_part(
    loaded: LoadedConfig,
    options: ModelOptions,
    artifacts: ModelArtifacts,
    backend: Backend,
    before_loading: int,
    logger: FilteringBoundLogger,
    peers: Peers = NO_PEERS,
    on_stage: OnStage = unheard,
) -> LoadedPart:
    """Place the weights, and give the model the memory that it decodes into.

    options: of the model, with its products settled. before_loading: bytes that the process had before it
    read the model's files. Raises ConfigError, ModelError, or RankLost where another rank does not do its
    part.
    """
    config, collectives = loaded.config, peers.collectives
    built = _place_weights(artifacts, options, config.cache.block_size, backend, collectives)
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
    largest_steps = partial(run_largest_steps, model, layout, ops, limits, Sampler(model.vocab_size))
    memory = _host_memory(before_loading, model, backend, collectives.size)
    sizes = share_of(config.cache, collectives.size)
    cache, kv_cache = make_cache(
        sizes, layout, ops, backend, largest_steps, memory, loaded.origins, peers.agree
    )
    cache = windowed(cache, model.window, limits.max_model_len, logger)
    num_swap_blocks = cache.num_host_blocks - cache.num_host_cache_blocks
    if num_swap_blocks < sizes.swap_space // layout.block_bytes:
        swap_space = format_size(num_swap_blocks * layout.block_bytes)
        logger.warning("swap_space_reduced", swap_space=swap_space, reason=memory.figures())
    graphs = None
    if collectives.size == 1:  # what is captured would hold a group that may be left and met anew
        graphs = decode_graphs(model, kv_cache, ops, backend, config.model, limits, logger)
    adapters = AdapterStore()
    runner = Runner(model, kv_cache, graphs, adapters)
    on_stage("KV cache")
    return LoadedPart(model, ops, built.deterministic, limits, cache, kv_cache, runner, adapters)


def choose_threads(options: ModelOptions, logger: FilteringBoundLogger) -> None:
    """As many as configured, or torch's choice within the processors that are this process's to run on: on a
    CPU its share of them, where other ranks compute beside it."""
    default, own, limit = torch.get_num_threads(), own_processors(), processor_limit()
    num_threads = options.num_threads
    if num_threads is None:
        num_threads = max(1, usable_processors(min(default, own), limit) // options.tensor_parallel_size)
    if num_threads != default:
        torch.set_num_threads(num_threads)
    logger.info(
        "threads", num_threads=num_threads, torch_default=default, processors=own, processor_quota=limit
    )


def finished(step: Callable[[_Step], object], backend: Backend) -> Callable[[_Step], None]:
    """The step, and the wait for what it enqueued."""

    def run(given: _Step) -> None:
        step(given)
        backend.synchronize()

    return run


def _host_memory(before_loading: int, model: CausalModel, backend: Backend, num_ranks: int) -> HostMemory:
    """Of the machine, whose memory ranks share alike. before_loading: as `load_part` has it."""
    weights = 0 if backend.device.type == "cuda" else model.weight_bytes
    # Weights that are mapped from a file take memory when they are first read.
    loaded = max(anonymous_memory() - before_loading, weights)
    return HostMemory(machine_memory() // num_ranks, before_loading + loaded)


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


def windowed(
    cache: CacheOptions, window: int | None, max_model_len: int, logger: FilteringBoundLogger
) -> CacheOptions:
    """Blocks behind the window of every layer are given back, where some are and no tier stands behind the
    device's prefix cache: chains that lack their beginning there could not be continued in it."""
    if window is None or window >= max_model_len:
        return cache
    if cache.num_host_cache_blocks:
        reason = "cache.host_cache_memory: what falls to the host is found by its whole chain"
        logger.warning("sliding_window_kept", keys=window, max_model_len=max_model_len, reason=reason)
        return cache
    logger.info("sliding_window", keys=window, max_model_len=max_model_len)
    return replace(cache, window=window)
