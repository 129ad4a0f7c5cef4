"""Mistakes in cutting a model for ranks and in putting its results together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest

from pageturner.service.model import build
from pageturner.service.model.options import Quantization
from pageturner.service.model.tensor_parallel import (
    decoder,
    parallel_layers,
    parallel_products,
    sharded_weights,
    shards,
)
from support.planting import plant


@dataclass(frozen=True)
class ShardBug:
    """`right`, which occurs once in the module, becomes `wrong`; users of `name` get it from there.

    family, scheme, size, changes: of a tiny model and its ranks on which it shows.
    """

    module: ModuleType
    right: str
    wrong: str
    user: ModuleType
    name: str
    family: str = "llama"
    scheme: Quantization = "none"
    size: int = 2
    changes: Sequence[tuple[str, int]] = ()

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        planted = plant(self.module, self.right, self.wrong)
        monkeypatch.setattr(self.user, self.name, getattr(planted, self.name))


def _of_products(right: str, wrong: str) -> ShardBug:
    return ShardBug(parallel_products, right, wrong, decoder, "ParallelProducts")


def _of_sums(right: str, wrong: str) -> ShardBug:
    return ShardBug(parallel_layers, right, wrong, build, "SummedLayer")


def _of_gatherings(right: str, wrong: str) -> ShardBug:
    return ShardBug(parallel_layers, right, wrong, build, "GatheredLayer", scheme="int8")


def _of_weights(right: str, wrong: str, family: str = "llama") -> ShardBug:
    return ShardBug(sharded_weights, right, wrong, build, "ShardedWeights", family)


def _of_packed_weights(right: str, wrong: str) -> ShardBug:
    return ShardBug(sharded_weights, right, wrong, build, "ShardedPackedFile", scheme="int8")


PLANTED_SHARD_BUGS = {
    "a shard off by a head": _of_weights(
        '"o_proj": _Cut((hidden, q_size), inputs=heads)',
        '"o_proj": _Cut((hidden, q_size), inputs=_moved(heads, width if shard.rank == 0 else -width))',
    ),
    "a forgotten sum of what attention adds": _of_sums(
        "        added = self._layer.out(attended)\n        self._collectives.all_reduce(added)\n",
        "        added = self._layer.out(attended)\n",
    ),
    "a forgotten sum of what the feed-forward part adds": _of_sums(
        "        added, residual = self._layer.mlp(hidden, residual)\n"
        "        self._collectives.all_reduce(added)\n",
        "        added, residual = self._layer.mlp(hidden, residual)\n",
    ),
    "a bias added on every rank": _of_weights(
        "return bias if self._shard.rank == 0 else torch.zeros_like(bias)", "return bias", "llama_bias"
    ),
    "the first rank's rows of up on every rank": _of_weights(
        '"up_proj": _Cut((inner, hidden), outputs=(shard.inner,))',
        '"up_proj": _Cut((inner, hidden), outputs=(range(len(shard.inner)),))',
    ),
    "gathered logits in the wrong order": _of_products(
        "self._products.head(hidden, residual), self._widths)",
        "self._products.head(hidden, residual), self._widths).roll(self._widths[0], 1)",
    ),
    "embeddings of another rank's tokens not blanked": _of_products(
        "        rows.masked_fill_(elsewhere[:, None], 0)\n", ""
    ),
    "a packed value read as the key of its head": _of_packed_weights(
        "_moved(kv_heads, q_size), _moved(kv_heads, q_size + k_size)",
        "_moved(kv_heads, q_size), _moved(kv_heads, q_size)",
    ),
    "packed rows of up taken from gate": _of_packed_weights(
        "outputs=(shard.inner, _moved(shard.inner, inner))", "outputs=(shard.inner, shard.inner)"
    ),
    "gated rows moved by a column": _of_gatherings(
        "self._ops.silu_and_mul(gate_up), self._inner)",
        "self._ops.silu_and_mul(gate_up).roll(1, 1), self._inner)",
    ),
    "a rank that reads the KV head of another": ShardBug(
        shards,
        "range(rank // sharers, rank // sharers + 1)",
        "range(rank % kv_heads, rank % kv_heads + 1)",
        build,
        "plan_shards",
        size=4,
        changes=(("num_key_value_heads", 2),),
    ),
}
