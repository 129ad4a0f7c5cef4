"""Layers of a shard, made whole by what ranks say to each other: sums in float, gatherings quantised."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pageturner.kernels.interface import PagedOps
from pageturner.service.model.products import Add, OpenLayer, Projection
from pageturner.service.model.quantised_products import QuantisedLayer
from pageturner.service.model.tensor_parallel.collectives import Collectives, gather_columns
from pageturner.service.model.tensor_parallel.shards import Shard


class SummedLayer:
    """`out` and `down` are cut by inputs; two sums. layer: this rank's."""

    def __init__(self, layer: OpenLayer, collectives: Collectives) -> None:
        self._layer, self._collectives = layer, collectives
        self.eps = layer.eps
        self.attention_norm, self.mlp_norm = layer.attention_norm, layer.mlp_norm

    def qkv(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Of this rank's heads."""
        return self._layer.qkv(hidden, residual)

    def out(self, attended: torch.Tensor) -> torch.Tensor:
        added = self._layer.out(attended)
        self._collectives.all_reduce(added)
        return added

    def mlp(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        added, residual = self._layer.mlp(hidden, residual)
        self._collectives.all_reduce(added)
        return added, residual

    def project(self, name: Projection, rows: torch.Tensor, add: Add) -> torch.Tensor:
        """rows: this rank's. What is added is added up with the rest."""
        product = self._layer.project(name, rows, add)
        if name in ("out", "down"):
            self._collectives.all_reduce(product)
        return product


class GatheredLayer:
    """All is cut by outputs; what `out` and `down` read and give is gathered. Every bit is that of one rank.

    (Added up in parts, a sum differs in its last bit, which may give a value another code on its way into the
    next product: by the end of thirty layers the logits are as far from those of one rank as these are from
    float32's.) layer: this rank's. shards: of all ranks. ops: between the products.
    """

    def __init__(
        self,
        layer: QuantisedLayer,
        shards: Sequence[Shard],
        head_dim: int,
        collectives: Collectives,
        ops: PagedOps,
    ) -> None:
        self._layer, self._collectives, self._ops = layer, collectives, ops
        self.eps = layer.eps
        self.attention_norm, self.mlp_norm = layer.attention_norm, layer.mlp_norm
        self._attended = [len(shard.heads) * head_dim for shard in shards]
        self._inner = [len(shard.inner) for shard in shards]
        self._hidden = [len(shard.hidden) for shard in shards]

    def qkv(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Of this rank's heads."""
        return self._layer.qkv(hidden, residual)

    def out(self, attended: torch.Tensor) -> torch.Tensor:
        rows = gather_columns(self._collectives, attended, self._attended)
        return self._whole(self._layer.out(rows))

    def mlp(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self._layer
        gate_up, residual = layer.ops.norm_linear(hidden, layer.mlp_norm, layer.eps, layer.gate_up, residual)
        rows = gather_columns(self._collectives, self._ops.silu_and_mul(gate_up), self._inner)
        return self._whole(layer.ops.linear(rows, layer.down)), residual

    def project(self, name: Projection, rows: torch.Tensor, add: Add) -> torch.Tensor:
        """rows: this rank's. `add` is given this rank's outputs, of `out` and `down` with all ranks' rows."""
        if name in ("qkv", "gate_up"):
            return self._layer.project(name, rows, add)
        widths = self._attended if name == "out" else self._inner
        return self._whole(self._layer.project(name, gather_columns(self._collectives, rows, widths), add))

    def _whole(self, columns: torch.Tensor) -> torch.Tensor:
        return gather_columns(self._collectives, columns, self._hidden)
