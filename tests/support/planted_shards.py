"""Mistakes in cutting a model for ranks and in putting its results together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest

from pageturner.service.model import build
from pageturner.service.model.options import Quantization
from pageturner.service.model.tensor_parallel import (
    cuts,
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


def _of_cuts(right: str, wrong: str) -> ShardBug:
    return ShardBug(cuts, right, wrong, sharded_weights, "summed_cuts")


def _of_packed_weights(right: str, wrong: str) -> ShardBug:
    return ShardBug(sharded_weights, right, wrong, build, "ShardedPackedFile", scheme="int8")


PLANTED_SHARD_BUGS = {
    "a shard off by a head": _of_cuts(
        "inputs=scaled(shard.heads, config.head_dim)",
        "inputs=scaled(moved(shard.heads, -1 if shard.rank else 1), config.head_dim)",
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
    "the first rank's rows of up on every rank": _of_cuts(
        '"up_proj": Cut((inner, hidden), outputs=(shard.inner,))',
        '"up_proj": Cut((inner, hidden), outputs=(range(len(shard.inner)),))',
    ),
    "gathered logits in the wrong order": _of_products(
        "self._products.head(hidden, residual), self._widths)",
        "self._products.head(hidden, residual), self._widths).roll(self._widths[0], 1)",
    ),
    "embeddings of another rank's tokens not blanked": _of_products(
        "        rows.masked_fill_(elsewhere[:, None], 0)\n", ""
    ),
    "a packed value read as the key of its head": _of_packed_weights(
        "moved(kv_heads, q_size), moved(kv_heads, q_size + k_size)",
        "moved(kv_heads, q_size), moved(kv_heads, q_size)",
    ),
    "packed rows of up taken from gate": _of_packed_weights(
        "outputs=(shard.inner, moved(shard.inner, inner))", "outputs=(shard.inner, shard.inner)"
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


def _of_adapters(right: str, wrong: str, scheme: Quantization = "none") -> ShardBug:
    name = "summed_cuts" if scheme == "none" else "gathered_cuts"
    return ShardBug(cuts, right, wrong, build, name, scheme=scheme)


PLANTED_ADAPTER_BUGS = {
    "B of the first rank's outputs on every rank": _of_adapters(
        "b = torch.cat([b[part.start : part.stop] for part in self.outputs])",
        "b = torch.cat([b[: len(part)] for part in self.outputs])",
    ),
    "A of the first rank's inputs on every rank": _of_adapters(
        "a = a[:, self.inputs.start : self.inputs.stop].clone()", "a = a[:, : len(self.inputs)].clone()"
    ),
    "values of the first rank's heads on every rank": _of_adapters(
        '"v_proj": Cut((k_size, hidden), outputs=(kv_heads,))',
        '"v_proj": Cut((k_size, hidden), outputs=(range(len(kv_heads)),))',
    ),
    "what is added to `down` cut by other outputs than its weight": _of_adapters(
        '"down_proj": Cut((hidden, inner), outputs=(shard.hidden,))',
        '"down_proj": Cut((hidden, inner), outputs=(range(len(shard.hidden)),))',
        "int8",
    ),
    "what is added left out of the sum": ShardBug(
        parallel_layers,
        "        product = self._layer.project(name, rows, add)\n"
        '        if name in ("out", "down"):\n'
        "            self._collectives.all_reduce(product)\n"
        "        return product\n",
        "        product = self._layer.project(name, rows, lambda product, read: None)\n"
        '        if name in ("out", "down"):\n'
        "            self._collectives.all_reduce(product)\n"
        "        add(product, rows)\n"
        "        return product\n",
        build,
        "SummedLayer",
    ),
    "rows of this rank alone read by what is added": ShardBug(
        parallel_layers,
        "return self._whole(self._layer.project(name, gather_columns(self._collectives, rows, widths), add))",
        "gathered = gather_columns(self._collectives, rows, widths)\n"
        "        return self._whole(self._layer.project(name, gathered, lambda product, read: add(\n"
        "            product, read.roll(rows.shape[1], 1))))",
        build,
        "GatheredLayer",
        scheme="int8",
    ),
}
