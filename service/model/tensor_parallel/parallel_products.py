"""A shard's products, made whole: what its ranks have to say to each other, and nothing else.

Two sums a layer, one for the embedding, and one gathering of the logits' columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pageturner.service.model.decoder_config import DecoderConfig
from pageturner.service.model.products import Layer, OpenLayer, Products, Projection
from pageturner.service.model.tensor_parallel.collectives import Collectives, gather_columns
from pageturner.service.model.tensor_parallel.shards import Shard


class ParallelLayer:
    """An `OpenLayer` whose sums are of all ranks. layer: this rank's."""

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

    def project(self, name: Projection, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product, read = self._layer.project(name, rows)
        if name in ("out", "down"):
            self._collectives.all_reduce(product)
        return product, read


class ParallelProducts:
    """`Products` of a whole model, of which this rank computes with one shard.

    config: of the whole model. shards: of all ranks. products: of this rank's, as a model of its own.
    """

    def __init__(
        self, config: DecoderConfig, shards: Sequence[Shard], products: Products, collectives: Collectives
    ) -> None:
        self.name, self.device = products.name, products.device
        self.dtype, self.kv_dtype = products.dtype, products.kv_dtype
        self.num_parameters = count_parameters(config)
        self.weight_bytes = products.weight_bytes
        self.layers: tuple[Layer[OpenLayer], ...] = tuple(
            Layer(ParallelLayer(layer.products, collectives), layer.q_norm, layer.k_norm)
            for layer in products.layers
        )
        self._vocabulary = shards[collectives.rank].vocabulary
        self._widths = [len(shard.vocabulary) for shard in shards]
        self._products, self._collectives = products, collectives

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        own = self._vocabulary
        elsewhere = (token_ids < own.start) | (token_ids >= own.stop)
        rows = self._products.embed((token_ids - own.start).masked_fill_(elsewhere, 0))
        # Adding zeros is exact: the sum has the bits of the one rank that has the row.
        rows.masked_fill_(elsewhere[:, None], 0)
        self._collectives.all_reduce(rows)
        return rows

    def head(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return gather_columns(self._collectives, self._products.head(hidden, residual), self._widths)


def count_parameters(config: DecoderConfig) -> int:
    """Weights of the whole model, one by one."""
    hidden, inner, (q_size, k_size, _) = config.hidden_size, config.intermediate_size, config.qkv_sizes
    products = (
        (q_size + 2 * k_size, hidden, config.qkv_bias),
        (hidden, q_size, config.out_bias),
        (2 * inner, hidden, config.mlp_bias),
        (hidden, inner, config.mlp_bias),
    )
    layer = sum(outputs * inputs + (outputs if bias else 0) for outputs, inputs, bias in products)
    norms = 2 * hidden + (2 * config.head_dim if config.qk_norm else 0)
    ends = 1 if config.tied_head else 2
    return config.num_layers * (layer + norms) + hidden + ends * config.vocab_size * hidden
