"""What each rank holds of a decoder: arithmetic alone.

q, k, v, gate and up are cut by outputs, embedding and head by the vocabulary; norms are whole on every rank.
What `out` and `down` read is then spread over the ranks. In float they are cut by those inputs, and ranks add
up what they give: Megatron's way (Shoeybi et al. 2019, arXiv:1909.08053). Quantised they are cut by outputs
as well, and ranks gather what they read: no sum is cut, so that every bit is that of one rank.

KV heads go whole, each with the query heads that read it; where there are more ranks than KV heads, ranks
share one and each keeps its KV. What doesn't divide evenly goes to ranks in parts that differ by one unit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pageturner.kernels.packed import TILE
from pageturner.service.errors import ConfigError
from pageturner.service.model.decoder_config import DecoderConfig

UNIT = TILE
"""Features, or tokens of the vocabulary, that stay together where there are enough for all ranks: so tiles of
packed weights stay whole."""


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds, as ranges of the whole model's: query heads, KV heads, the feed-forward part's
    inner features, rows of the vocabulary, and hidden features, where those are cut."""

    rank: int
    size: int
    heads: range
    kv_heads: range
    inner: range
    vocabulary: range
    hidden: range

    @property
    def is_whole(self) -> bool:
        """Whether there is no other rank."""
        return self.size == 1

    def config(self, whole: DecoderConfig) -> DecoderConfig:
        """Of the model that this shard by itself would be: the sizes of what is loaded and computed."""
        return replace(
            whole,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.inner),
            vocab_size=len(self.vocabulary),
        )

    def describe(self, whole: DecoderConfig) -> str:
        """In words, for the log: `heads 0 to 5 of 9, ...`."""
        parts = (
            ("heads", self.heads, whole.num_heads),
            ("KV heads", self.kv_heads, whole.num_kv_heads),
            ("inner features", self.inner, whole.intermediate_size),
            ("tokens", self.vocabulary, whole.vocab_size),
        )
        return ", ".join(f"{name} {part.start} to {part[-1]} of {total}" for name, part, total in parts)


def plan_shards(config: DecoderConfig, size: int) -> tuple[Shard, ...]:
    """Those of all ranks. Raises ConfigError, with the numbers, for more ranks than there are parts for."""
    parts = zip(
        _split_heads(config, size),
        _split("inner features", config.intermediate_size, size),
        _split("tokens", config.vocab_size, size),
        _split("hidden features", config.hidden_size, size),
        strict=True,
    )
    return tuple(
        Shard(rank, size, heads, kv_heads, inner, vocabulary, hidden)
        for rank, ((heads, kv_heads), inner, vocabulary, hidden) in enumerate(parts)
    )


def split(total: int, size: int, unit: int = 1) -> tuple[range, ...]:
    """[0, total) in `size` parts of whole units, in order; as even as units allow, and empty where there are
    fewer units than parts. The last unit may be cut short."""
    units = -(-total // unit)
    bounds = [min(rank * units // size * unit, total) for rank in range(size + 1)]
    return tuple(map(range, bounds, bounds[1:]))


def _split(what: str, total: int, size: int) -> tuple[range, ...]:
    parts = split(total, size, UNIT)
    if not all(parts):
        parts = split(total, size)
    if not all(parts):
        raise _refused(size, f"the model has {total} {what}, and each rank needs some")
    return parts


def _split_heads(config: DecoderConfig, size: int) -> list[tuple[range, range]]:
    """Of each rank, its query heads and the KV heads that they read."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if size <= kv_heads:
        group = heads // kv_heads
        return [(range(part.start * group, part.stop * group), part) for part in split(kv_heads, size)]
    if size % kv_heads or heads % size:
        reason = f"the model has {heads} heads that read {kv_heads} KV heads: where ranks share a KV head, "
        raise _refused(size, f"{reason}{kv_heads} must divide the ranks, and the ranks {heads}")
    mine, sharers = heads // size, size // kv_heads
    return [
        (range(rank * mine, (rank + 1) * mine), range(rank // sharers, rank // sharers + 1))
        for rank in range(size)
    ]


def _refused(size: int, reason: str) -> ConfigError:
    return ConfigError("model.tensor_parallel_size", f"{size} ranks: {reason}")
