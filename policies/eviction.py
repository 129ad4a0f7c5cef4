"""Which cached block is overwritten first?

A score is asked once, when the block is released, so it is a *time*: the moment of release, plus the
seconds by which this block deserves to outlive one released with no merit. Time passing then ages
every block alike, and no score goes stale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pageturner.policies.options import check_option
from pageturner.policies.views import BlockView


@dataclass(frozen=True, slots=True)
class Lru:
    """The longest unused first. Source: vLLM and SGLang evict so."""

    name: ClassVar[str] = "lru"
    summary: ClassVar[str] = (
        "wins when what was just used is used again; loses to a scan of prompts that never return"
    )

    def score(self, block: BlockView) -> float:
        return block.released_at


@dataclass(frozen=True, slots=True)
class Lfu:
    """The least often hit first; each hit is worth `seconds_per_hit` of recency, so old hits fade.

    Source: LFU with dynamic ageing (Arlitt et al., 2000), its age being the clock.
    """

    name: ClassVar[str] = "lfu"
    summary: ClassVar[str] = "wins when a few prompts stay popular; loses when popularity moves on quickly"

    seconds_per_hit: float = 600.0
    """Seconds of recency that a hit is worth."""

    def __post_init__(self) -> None:
        check_option(self, "seconds_per_hit", at_least=0)

    def score(self, block: BlockView) -> float:
        return block.released_at + self.seconds_per_hit * block.num_hits


@dataclass(frozen=True, slots=True)
class SegmentedLru:
    """Blocks on probation first, then protected ones: those hit `protect_after_hits` times.

    Protection lasts `protected_seconds` longer than probation, where the original bounds its size.
    Source: segmented LRU (Karedla, Love and Wherry, 1994).
    """

    name: ClassVar[str] = "segmented-lru"
    summary: ClassVar[str] = (
        "wins against scans: one-time prompts go first; loses to lru if reuse comes only once"
    )

    protect_after_hits: int = 1
    """Hits after which a block is protected."""
    protected_seconds: float = 600.0
    """Seconds that protection lasts longer than probation."""

    def __post_init__(self) -> None:
        check_option(self, "protect_after_hits", at_least=1)
        check_option(self, "protected_seconds", at_least=0)

    def score(self, block: BlockView) -> float:
        is_protected = block.num_hits >= self.protect_after_hits
        return block.released_at + (self.protected_seconds if is_protected else 0.0)


@dataclass(frozen=True, slots=True)
class CostAware:
    """The cheapest to lose first: losing a block costs it and all blocks behind it in its chain.

    A block with d before it costs 1 + context_weight x d to compute again. The sum to the end of the
    chain, times one more than its hits, is worth `seconds_per_block` each; so tails go before heads, and
    short chains before long ones. Source: GreedyDual-Size-Frequency (Cherkasova, 1998), for prefix
    trees RAGCache (Jin et al., 2024).
    """

    name: ClassVar[str] = "cost-aware"
    summary: ClassVar[str] = "wins when long shared prompts return; loses room to long prompts that never do"

    seconds_per_block: float = 1.0
    """Seconds of recency that the cost of one block is worth."""
    context_weight: float = 0.01
    """What each block before it adds to the cost of computing a block."""

    def __post_init__(self) -> None:
        check_option(self, "seconds_per_block", at_least=0)
        check_option(self, "context_weight", at_least=0)

    def score(self, block: BlockView) -> float:
        num_behind = block.num_chain_blocks - block.depth
        # An unknown chain costs one block: to judge it by depth alone would have heads go before tails.
        cost = 1.0
        if num_behind > 0:
            mean_depth = block.depth + (num_behind - 1) / 2
            cost = num_behind * (1 + self.context_weight * mean_depth)
        return block.released_at + self.seconds_per_block * (1 + block.num_hits) * cost


@dataclass(frozen=True, slots=True)
class PriorityWithTtl:
    """The least urgent request's blocks first; every level of priority lasts `ttl_seconds`.

    A block outlives all of lower levels for that time, then counts as one of the level below, and so on
    down; within a level the longest unused goes first. Levels beyond `max_level` either way count as that.
    Source: the retention priorities with a duration of TensorRT-LLM, in the form of a time.
    """

    name: ClassVar[str] = "priority-ttl"
    summary: ClassVar[str] = "wins when urgent prompts come back to their prefix; loses room if they never do"

    ttl_seconds: float = 300.0
    """Seconds that a block outlives those one level less urgent."""
    max_level: int = 8
    """Priorities beyond this, either way, count as this."""

    def __post_init__(self) -> None:
        check_option(self, "ttl_seconds", at_least=0)
        check_option(self, "max_level", at_least=1)

    def score(self, block: BlockView) -> float:
        level = max(-self.max_level, min(block.priority, self.max_level))
        return block.released_at + self.ttl_seconds * level
