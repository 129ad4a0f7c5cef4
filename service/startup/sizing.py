"""How big the pools and the longest sequence are, from what the operator asked for and the machine has."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace

from pageturner.service.config import CacheConfig
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.errors import ConfigError
from pageturner.service.model.memory import DeviceMemory, MemoryMeter
from pageturner.service.sizes import Bytes

CPU_CACHE_SHARE = 0.25
CPU_CACHE_BYTES = 1 << 30
"""Without a budget of the operator's: this share of the machine's memory, and at most so many bytes."""

CPU_HEADROOM = 1 / 16
"""Of the machine's memory, for a step's own tensors and for what else runs there."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of main memory: total, that this process may use; in_use, of it, with the model loaded."""

    total: int
    in_use: int = 0

    @property
    def left(self) -> int:
        """What pools may take."""
        return max(0, self.total - self.in_use - int(self.total * CPU_HEADROOM))

    def figures(self) -> str:
        """In words, for an error."""
        return f"of the machine's {about(self.total)}, {about(self.in_use)} are in use"


def share_of(config: CacheConfig, size: int) -> CacheConfig:
    """What one of `size` ranks takes of the sizes that are given for all together. Blocks are on all
    ranks."""
    if size == 1:
        return config
    memory = config.kv_cache_memory
    return replace(
        config,
        kv_cache_memory=None if memory is None else Bytes(memory // size),
        swap_space=Bytes(config.swap_space // size),
        host_cache_memory=Bytes(config.host_cache_memory // size),
    )


def size_cache(
    config: CacheConfig, block_bytes: int, memory: HostMemory, given: Container[str] = ()
) -> CacheOptions:
    """Bytes to blocks, of a pool and a swap space that fit beside the model together.

    given: the keys that the operator stated. What is stated and does not fit raises ConfigError; a default
    shrinks. So does one that leaves not one block raise it.
    """
    num_blocks = config.num_blocks
    if num_blocks is None:
        share = min(int(memory.total * CPU_CACHE_SHARE), CPU_CACHE_BYTES, memory.left)
        budget = share if config.kv_cache_memory is None else int(config.kv_cache_memory)
        num_blocks = budget // block_bytes
        if num_blocks < 1:
            reason = f"{about(budget)} hold not one block of {about(block_bytes)}"
            raise ConfigError("cache.kv_cache_memory", f"{reason}; {memory.figures()}")
    # Memory is only promised when it is reserved: what is not there would end the server under load.
    pool_bytes = num_blocks * block_bytes
    if pool_bytes > memory.left:
        reason = f"{about(pool_bytes)} are more than the {about(memory.left)} left: {memory.figures()}"
        raise ConfigError(key_of_blocks(config), reason)
    return _options(
        config, num_blocks, *_fit_host(config, memory.left - pool_bytes, memory, given, block_bytes)
    )


def _fit_host(
    config: CacheConfig, left: int, memory: HostMemory, given: Container[str], block_bytes: int
) -> tuple[int, int]:
    """Blocks of the swap space, and of the cache beside it. Raises ConfigError for what does not fit."""
    cache_bytes = int(config.host_cache_memory)
    if cache_bytes > left:
        reason = (
            f"{about(cache_bytes)} are more than the {about(left)} left beside the pool: {memory.figures()}"
        )
        raise ConfigError("cache.host_cache_memory", reason)
    if 0 < cache_bytes < block_bytes:
        reason = f"{about(cache_bytes)} hold not one block of {about(block_bytes)}"
        raise ConfigError("cache.host_cache_memory", reason)
    swap_bytes = _fit_swap(config, left - cache_bytes, memory, given)
    return swap_bytes // block_bytes, cache_bytes // block_bytes


def _fit_swap(config: CacheConfig, left: int, memory: HostMemory, given: Container[str]) -> int:
    """Bytes of swap space: what was stated, or of the default what is left. Raises ConfigError."""
    asked = int(config.swap_space)
    if asked > left and "cache.swap_space" in given:
        reason = f"{about(asked)} are more than the {about(left)} left beside the pool: {memory.figures()}"
        raise ConfigError("cache.swap_space", reason)
    return min(asked, left)


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
    config: CacheConfig,
    block_bytes: int,
    device: DeviceMemory,
    memory: HostMemory,
    given: Container[str] = (),
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
    key = "cache.gpu_memory_utilization" if asked is None else key_of_blocks(config)
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
    return _options(config, size // block_bytes, *_fit_host(config, memory.left, memory, given, block_bytes))


def about(size: int) -> str:
    """A size for the eye: 1.5GiB."""
    for power, prefix in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.3g}{prefix}"
    return f"{size} bytes"


def key_of_blocks(config: CacheConfig) -> str:
    """What decides the size of the pool."""
    return "cache.num_blocks" if config.num_blocks is not None else "cache.kv_cache_memory"


def _options(
    config: CacheConfig, num_blocks: int, num_swap_blocks: int, num_host_cache_blocks: int
) -> CacheOptions:
    return CacheOptions(
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_host_blocks=num_swap_blocks + num_host_cache_blocks,
        num_host_cache_blocks=num_host_cache_blocks,
        enable_prefix_caching=config.enable_prefix_caching,
        reuse_partial_blocks=config.reuse_partial_blocks,
    )


def fit_model_len(options: SchedulerOptions, max_position: int, given: Container[str]) -> SchedulerOptions:
    """max_model_len as the model allows. Raises ConfigError if more was asked for: `given` has its key."""
    if options.max_model_len <= max_position:
        return options
    if "scheduler.max_model_len" in given:
        reason = f"{options.max_model_len} is more than the {max_position} positions of the model"
        reason += "; model.rope_scaling stretches them"
        raise ConfigError("scheduler.max_model_len", reason)
    return replace(options, max_model_len=max_position)
