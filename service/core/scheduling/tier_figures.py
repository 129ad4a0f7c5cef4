"""What the tiers of the prefix cache tell in SchedulerStats."""

from __future__ import annotations

from dataclasses import replace

from pageturner.service.core.memory.block_manager import BlockManager
from pageturner.service.core.stats import SchedulerStats


def with_tiers(stats: SchedulerStats, manager: BlockManager) -> SchedulerStats:
    """The figures with those of the tiers, if evicted blocks live on anywhere.

    Host hits are tokens that were copied back in place of being computed; disk hits, those that were read
    into the host for it. Blocks that transfers hold are used by no request.
    """
    tiers = manager.tiers
    if tiers is None:
        return stats
    counts, block_size = tiers.counts, manager.block_size
    return replace(
        stats,
        num_host_blocks_used=stats.num_host_blocks_used - tiers.num_held,
        num_host_blocks_cached=manager.host.num_cached,
        num_disk_blocks_cached=0 if tiers.disk is None else tiers.disk.num_blocks,
        num_host_hit_tokens_total=counts.restored * block_size,
        num_disk_hit_tokens_total=counts.loaded * block_size,
        num_spilled_blocks_total=counts.spilled,
        num_disk_writes_dropped_total=counts.unwritten,
        num_disk_reads_failed_total=counts.unread,
    )
