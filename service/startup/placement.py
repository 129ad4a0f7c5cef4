"""Where the model computes, as configured and as the machine has it: the device, its cache, its graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from structlog.typing import FilteringBoundLogger

from pageturner.kernels.errors import KernelsUnavailable
from pageturner.kernels.interface import PagedOps
from pageturner.kernels.layout import KvLayout
from pageturner.kernels.selection import select_ops, select_quantised
from pageturner.service.config import CacheConfig, ServiceConfig
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.errors import ConfigError
from pageturner.service.model.backend import Backend, HeadShape, backend_of, choose_device
from pageturner.service.model.causal_model import CausalModel
from pageturner.service.model.kv_cache import HostPoolRefused, KvCache
from pageturner.service.model.options import ModelOptions
from pageturner.service.startup.sizing import (
    HostMemory,
    key_of_blocks,
    measure_memory,
    size_cache,
    size_gpu_cache,
)

if TYPE_CHECKING:
    from pageturner.service.model.graphs import DecodeGraphs


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
                deterministic=bool(config.model.deterministic),
                cache_dir=cache_dir,
                group=heads.num_heads // heads.num_kv_heads,
                allow_fallback=config.model.allow_fallback,
                debug=config.model.debug_kernels,
            )
        except KernelsUnavailable as reason:
            advice = "model.allow_fallback = true serves without the CUDA kernels, slower"
            raise ConfigError("model.device", f"{device}: {reason}; {advice}") from reason

    return backend_of(device, choose_ops, select_quantised(device, cache_dir))


def unanimous(cache: CacheOptions) -> CacheOptions:
    """Where there is no other rank."""
    return cache


def make_cache(
    config: CacheConfig,
    layout: KvLayout,
    ops: PagedOps,
    backend: Backend,
    largest_steps: Callable[[], object],
    memory: HostMemory,
    given: Container[str] = (),
    agree: Callable[[CacheOptions], CacheOptions] = unanimous,
) -> tuple[CacheOptions, KvCache]:
    """As large as was asked for, or as the memory beside the largest steps allows.

    memory: of the host. given: the keys that the operator stated. agree: what of the sizes that fit here fits
    on all ranks. Raises ConfigError.
    """
    if backend.meter is None:
        cache = size_cache(config, layout.block_bytes, memory, given)
    else:
        try:
            device = measure_memory(backend.meter, largest_steps)
        except KernelsUnavailable as error:  # kernels for this model's masks load when they are first met
            raise ConfigError("model.device", f"{backend.device}: {error}") from error
        cache = size_gpu_cache(config, layout.block_bytes, device, memory, given)
    cache = agree(cache)
    try:
        kv_cache = KvCache(
            layout, cache.num_blocks, cache.num_host_blocks, ops, backend.device, backend.streams
        )
    except HostPoolRefused as error:
        raise ConfigError("cache.swap_space", str(error)) from error
    except MemoryError as error:
        raise ConfigError(key_of_blocks(config), str(error)) from error
    except torch.OutOfMemoryError as error:
        reason = f"{cache.num_blocks} blocks are no longer free on {backend.device}: {error}"
        raise ConfigError("cache.gpu_memory_utilization", reason) from error
    return cache, kv_cache


def decode_graphs(
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
