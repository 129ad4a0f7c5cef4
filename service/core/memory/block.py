"""A block's record, how it is let go, and both a block and a pool as values."""

from __future__ import annotations

from dataclasses import dataclass


class OutOfBlocks(Exception):
    """An allocation asked for more than free + evictable; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Release:
    """Circumstances of a release, for the eviction policy all but the first.

    fence: the last step that may touch the block, 0 for none. num_chain_blocks: blocks of the chain that
    is let go, from its head (0: unknown).
    """

    fence: int = 0
    now: float = 0.0
    tenant: str = ""
    priority: int = 0
    num_chain_blocks: int = 0


NO_RELEASE = Release()


@dataclass(slots=True, eq=False)
class Block:
    """One block's record; `BlockPool` is the only writer.

    num_partial_tokens: that its hash stands for, of a cached block that is not full; 0 for any other.
    """

    block_id: int
    ref_count: int = 0
    block_hash: bytes | None = None
    parent_hash: bytes | None = None
    depth: int = 0
    num_partial_tokens: int = 0
    num_hits: int = 0
    fence: int = 0
    last_release: Release = NO_RELEASE
    is_pending: bool = False
    heap_version: int = 0
    in_heap: bool = False


@dataclass(frozen=True, slots=True)
class BlockState:
    """A block that is not free, as a value. Its fields are those of `Block`."""

    block_id: int
    ref_count: int
    block_hash: bytes | None
    parent_hash: bytes | None
    depth: int
    num_hits: int
    fence: int
    is_pending: bool
    last_release: Release
    num_partial_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PoolState:
    """A whole pool, as a value.

    free: a stack, the last one is taken first. evictable: (score, order of release, block), in the order of
    eviction. Totals that only feed statistics are not kept.
    """

    free: tuple[int, ...]
    blocks: tuple[BlockState, ...]
    evictable: tuple[tuple[float, int, int], ...]
    release_order: int
    completed_step: int
