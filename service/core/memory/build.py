"""A block manager with its pools, and the tiers behind them, as the options say."""

from __future__ import annotations

from collections.abc import Callable

from pageturner.policies.views import BlockView
from pageturner.service.core.memory.block_manager import BlockManager
from pageturner.service.core.memory.block_pool import BlockPool
from pageturner.service.core.memory.prefix_cache import PrefixHasher
from pageturner.service.core.memory.tiers import CacheTiers
from pageturner.service.core.memory.transfers import BlockDisk
from pageturner.service.core.memory.window import SlidingWindow
from pageturner.service.core.memory.windowed import WindowedBlockManager, WindowedBlockPool
from pageturner.service.core.options import CacheOptions


def build_manager(
    cache: CacheOptions,
    hasher: PrefixHasher,
    score: Callable[[BlockView], float],
    now: Callable[[], float],
    disk: BlockDisk | None = None,
) -> BlockManager:
    """score: of the device's cached blocks, as `BlockPool` says. now: the scheduler's clock. disk: of the
    prefix cache; of no use without its host tier."""
    host = BlockPool(cache.num_host_blocks, cache.block_size)
    has_tiers = cache.enable_prefix_caching and cache.num_host_cache_blocks > 0
    tiers = (
        CacheTiers(host, cache.num_host_cache_blocks, disk, saves_evictions=cache.saves_evictions)
        if has_tiers
        else None
    )
    used, partial = (hasher if cache.enable_prefix_caching else None), cache.reuse_partial_blocks
    if cache.window is None or tiers is not None:  # a tier would bring back what the window has passed
        device = BlockPool(cache.num_blocks, cache.block_size, score)
        return BlockManager(device, host, used, reuse_partial_blocks=partial, tiers=tiers)
    return WindowedBlockManager(
        WindowedBlockPool(cache.num_blocks, cache.block_size, score),
        host,
        used,
        reuse_partial_blocks=partial,
        window=SlidingWindow(cache.window, cache.block_size),
        now=now,
    )
