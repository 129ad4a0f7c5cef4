"""Opens the disk of the prefix cache, measures it, and ties it to an engine's memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from structlog.typing import FilteringBoundLogger

from pageturner.service.config import CacheConfig
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.engine.disk_tier import DiskTier
from pageturner.service.engine.lower_tier import CachedBlock, LowerTier
from pageturner.service.engine.tier_exchange import TierExchange
from pageturner.service.engine.tier_files import TierFiles, TierFolderInUse, TierFolderUnusable
from pageturner.service.errors import ConfigError
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.startup.loading import LoadedModel

_PROBES = 8
"""Blocks that are written and read to measure the disk."""


@dataclass(frozen=True, slots=True)
class OpenedDisk:
    """The disk of a model's prefix cache. key: the secret of its blocks' names."""

    tier: DiskTier
    key: bytes


def open_disk(
    config: CacheConfig, model: LoadedModel, fingerprint: str, logger: FilteringBoundLogger
) -> tuple[LoadedModel, OpenedDisk | None]:
    """The disk, if a folder is given, and the model with its rate and size. fingerprint: of the server.

    A folder from which another process serves the same model is left to that one, with a warning. Raises
    ConfigError for one that can't be used.
    """
    if config.disk_cache_folder is None:
        return model, None
    block_bytes = model.block_bytes
    with ExitStack() as opened:
        try:
            files = TierFiles(
                config.disk_cache_folder,
                f"{fingerprint};layout={model.kv_cache.layout!r}",
                block_bytes,
            )
            opened.callback(files.close)
            rate = measure_reads(files, time.perf_counter)
            found = files.found(int(config.disk_cache_size))
        except TierFolderInUse as error:
            logger.warning("disk_cache_off", reason=str(error))
            return model, None
        except (TierFolderUnusable, OSError) as error:
            raise ConfigError("cache.disk_cache_folder", f"can't be used: {error}") from error
        capacity = int(config.disk_cache_size) // files.file_bytes
        if not capacity:
            reason = f"{config.disk_cache_size} bytes hold not one block of {files.file_bytes}"
            raise ConfigError("cache.disk_cache_size", reason)
        opened.pop_all()
    logger.info(
        "disk_cache_open",
        folder=str(files.folder),
        num_blocks=len(found),
        capacity=capacity,
        read_mib_per_second=round(rate / (1 << 20)),
    )
    tier = DiskTier(files, capacity, partial(bytes_of, model.kv_cache.host_pool), found, logger)
    model = replace(
        model,
        rates=replace(model.rates, disk_read_bytes_per_second=rate),
        cache=replace(model.cache, num_disk_cache_blocks=capacity),
    )
    return model, OpenedDisk(tier, files.key)


def tie_tier(
    tier: LowerTier, scheduler: Scheduler, kv_cache: KvCache, logger: FilteringBoundLogger
) -> TierExchange:
    """What carries blocks between the memory that the scheduler plans and the tier behind it."""
    return TierExchange(
        scheduler,
        tier,
        lambda: kv_cache.fences.copies_so_far().synchronize,
        lambda: cached_blocks(scheduler, kv_cache),
        logger,
    )


def cached_blocks(scheduler: Scheduler, kv_cache: KvCache) -> Iterator[CachedBlock]:
    """The full blocks that the device holds, then those of the host."""
    manager = scheduler.manager
    for pool, tensor in ((manager.device, kv_cache.pool), (manager.host, kv_cache.host_pool)):
        for block_hash, block_id in pool.full_cached_blocks():
            yield CachedBlock(block_hash, partial(bytes_of, tensor, block_id))


def bytes_of(pool: torch.Tensor, block_id: int) -> memoryview:
    """A block's bytes over all layers; of a pool of the processor's own, they may be written."""
    block = pool[block_id].cpu().contiguous().view(torch.uint8).reshape(-1)
    content: np.ndarray[tuple[int], np.dtype[np.uint8]] = block.numpy()
    return content.data


def measure_reads(files: TierFiles, timer: Callable[[], float]) -> float:
    """Bytes a second of blocks that the system does not have in memory, their seals checked.

    Raises OSError where nothing can be written or read.
    """
    content = bytearray(os.urandom(files.block_bytes))
    names = [bytes([255 - number]) * 16 for number in range(_PROBES)]
    try:
        for name in names:
            files.write(name, memoryview(content))
            forget_pages(files, name)
        started = timer()
        for name in names:
            files.read(name, memoryview(content))
        seconds = max(timer() - started, 1e-9)
    finally:
        for name in names:
            files.remove(name)
    return _PROBES * files.block_bytes / seconds


def forget_pages(files: TierFiles, block_hash: bytes) -> None:
    """Have the system forget a file's pages, so that it is read from the medium next."""
    file = os.open(files.path(block_hash), os.O_RDONLY)
    try:
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
