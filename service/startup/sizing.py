"""How big the pools and the longest sequence are, from what the operator asked for and the machine has."""

from __future__ import annotations

import os
from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path

from pageturner.service.config import CacheConfig
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.errors import ConfigError
from pageturner.service.model.memory import DeviceMemory, MemoryMeter
from pageturner.service.schema import Bytes, format_size

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
    _check_machine(_key_of_blocks(config), num_blocks * block_bytes, memory_bytes)
    _check_machine("cache.swap_space", int(config.swap_space), memory_bytes)
    return _options(config, num_blocks, block_bytes)


def measure_memory(meter: MemoryMeter, largest_steps: Callable[[], object]) -> DeviceMemory:
    """What the device has and needs, with the model loaded and no cache yet.

    Raises ConfigError if the largest step does not fit beside the weights.
    """
    weights = meter.tensors()
    try:
        activations = meter.peak_of(largest_steps)
    except MemoryError as error:
        left = about(meter.total() - meter.in_use())
        reason = f"a step of so many tokens does not fit in the {left} that the weights leave of the GPU"
        raise ConfigError("scheduler.max_num_batched_tokens", reason) from error
    # Asked last: what is loaded when it is first used, such as the code of kernels, is there by now.
    return DeviceMemory(meter.total(), weights, meter.in_use(), activations)


def size_gpu_cache(
    config: CacheConfig, block_bytes: int, device: DeviceMemory, machine_bytes: int
) -> CacheOptions:
    """A GPU's bytes to blocks: what gpu_memory_utilization of it leaves, unless a size was asked for.

    Raises ConfigError, with the figures, if that is not one block, or more than there is.
    """
    share = int(device.total * config.gpu_memory_utilization)
    asked = config.kv_cache_memory
    if config.num_blocks is not None:
        asked = Bytes(config.num_blocks * block_bytes)
    left = (share if asked is None else device.total) - device.in_use - device.activations
    size = left if asked is None else asked
    key = "cache.gpu_memory_utilization" if asked is None else _key_of_blocks(config)
    figures = (
        f"of the GPU's {about(device.total)}, weights take {about(device.weights)}, others "
        f"{about(device.in_use - device.weights)}, and activations {about(device.activations)}"
    )
    if size < block_bytes:
        reason = f"{about(max(size, 0))} hold not one block of {about(block_bytes)}"
        raise ConfigError(key, f"{reason}: {figures}; the share is {config.gpu_memory_utilization:g}")
    if size > left:
        raise ConfigError(key, f"{about(size)} are more than the {about(max(left, 0))} left: {figures}")
    # Pinned memory can't be paged out: the machine must have it, and something else beside it.
    _check_machine("cache.swap_space", int(config.swap_space), machine_bytes)
    return _options(config, size // block_bytes, block_bytes)


def about(size: int) -> str:
    """A size for the eye: 1.5GiB."""
    for power, prefix in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.3g}{prefix}"
    return f"{size} bytes"


def _key_of_blocks(config: CacheConfig) -> str:
    return "cache.num_blocks" if config.num_blocks is not None else "cache.kv_cache_memory"


def _check_machine(key: str, size: int, memory_bytes: int) -> None:
    if size > memory_bytes:
        raise ConfigError(key, f"{format_size(size)} are more than the machine's {format_size(memory_bytes)}")


def _options(config: CacheConfig, num_blocks: int, block_bytes: int) -> CacheOptions:
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
