"""A layer's products with what adapters add to them, op by op: the seam of `products` for a step that has
adapters."""

from __future__ import annotations

import torch

from pageturner.kernels.interface import PagedOps
from pageturner.kernels.low_rank import LowRankOps
from pageturner.service.model.adapter_store import BatchAdapters
from pageturner.service.model.products import OpenLayer, Projection


class AdaptedLayer:
    """`LayerProducts` of one step. ops: between the products. index: of the layer."""

    def __init__(
        self, layer: OpenLayer, index: int, ops: PagedOps, low_rank: LowRankOps, adapters: BatchAdapters
    ) -> None:
        self._layer, self._ops, self._low_rank = layer, ops, low_rank
        self._rows = adapters.rows
        self._parts = [weights.layers[index] for weights in adapters.weights]

    def qkv(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self._ops.rms_norm(hidden, self._layer.attention_norm, self._layer.eps, residual)
        return self._project("qkv", normed), residual

    def out(self, attended: torch.Tensor) -> torch.Tensor:
        return self._project("out", attended)

    def mlp(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self._ops.rms_norm(hidden, self._layer.mlp_norm, self._layer.eps, residual)
        return self._project("down", self._ops.silu_and_mul(self._project("gate_up", normed))), residual

    def _project(self, name: Projection, rows: torch.Tensor) -> torch.Tensor:
        low_ranks = [getattr(part, name) for part in self._parts]

        def add(product: torch.Tensor, read: torch.Tensor) -> None:
            self._low_rank.add(product, read, self._rows, low_ranks)

        return self._layer.project(name, rows, add)
