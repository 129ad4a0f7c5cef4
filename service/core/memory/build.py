"""A block manager with its pools, and the tiers behind them, as the options say."""

from __future__ import annotations

from collections.abc import Callable

from pageturner.policies.views import BlockView
from pageturner.service.core.memory.block_manager import BlockManager
from pageturner.service.core.memory.block_pool import BlockPool
from pageturner.service.core.memory.prefix_cache import PrefixHasher
from pageturner.service.core.memory.tiers import CacheTiers
from pageturner.service.core.memory.transfers import BlockDisk
from pageturner.service.core.options import CacheOptions


def build_manager(
    cache: CacheOptions,
    hasher: PrefixHasher,
    score: Callable[[BlockView], float],
    disk: BlockDisk | None = None,
) -> BlockManager:
    """score: of the device's cached blocks, as `BlockPool` says. disk: of the prefix cache; of no use without
    its host tier."""
    host = BlockPool(cache.num_host_blocks, cache.block_size)
    has_tiers = cache.enable_prefix_caching and cache.num_host_cache_blocks > 0
    return BlockManager(
        BlockPool(cache.num_blocks, cache.block_size, score),
        host,
        hasher if cache.enable_prefix_caching else None,
        reuse_partial_blocks=cache.reuse_partial_blocks,
        tiers=CacheTiers(host, cache.num_host_cache_blocks, disk) if has_tiers else None,
    )
