"""How big the pools and the longest sequence are, from what the operator asked for and the machine has."""

from __future__ import annotations

import os
from collections.abc import Container
from dataclasses import replace
from pathlib import Path

from pageturner.service.config import CacheConfig
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.errors import ConfigError
from pageturner.service.schema import format_size

CPU_CACHE_SHARE = 0.25
CPU_CACHE_BYTES = 1 << 30
"""Without a budget of the operator's: this share of the machine's memory, and at most so many bytes."""

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def machine_memory(limit_files: tuple[Path, ...] = _CGROUP_LIMITS) -> int:
    """Bytes this process may use: the machine's, or its container's where that is less."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in limit_files:
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            memory = min(memory, int(text))
    return memory


def size_cache(config: CacheConfig, block_bytes: int, memory_bytes: int) -> CacheOptions:
    """Bytes to blocks. Raises ConfigError for a budget that holds not one block, or over the memory."""
    num_blocks = config.num_blocks
    if num_blocks is None:
        budget = config.kv_cache_memory or min(int(memory_bytes * CPU_CACHE_SHARE), CPU_CACHE_BYTES)
        num_blocks = budget // block_bytes
        if num_blocks < 1:
            reason = f"{format_size(budget)} hold not one block of {format_size(block_bytes)}"
            raise ConfigError("cache.kv_cache_memory", reason)
    # Memory is only promised when it is reserved: what is not there would end the server under load.
    key = "cache.num_blocks" if config.num_blocks is not None else "cache.kv_cache_memory"
    for name, size in ((key, num_blocks * block_bytes), ("cache.swap_space", int(config.swap_space))):
        if size > memory_bytes:
            raise ConfigError(
                name, f"{format_size(size)} are more than the machine's {format_size(memory_bytes)}"
            )
    return CacheOptions(
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_host_blocks=config.swap_space // block_bytes,
        enable_prefix_caching=config.enable_prefix_caching,
    )


def fit_model_len(options: SchedulerOptions, max_position: int, given: Container[str]) -> SchedulerOptions:
    """max_model_len as the model allows. Raises ConfigError if more was asked for: `given` has its key."""
    if options.max_model_len <= max_position:
        return options
    if "scheduler.max_model_len" in given:
        reason = f"{options.max_model_len} is more than the {max_position} positions of the model"
        raise ConfigError("scheduler.max_model_len", reason)
    return replace(options, max_model_len=max_position)
