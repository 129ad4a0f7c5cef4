"""A shard's products, made whole: one sum for the embedding, one gathering of the logits' columns, and what
layers say (`parallel_layers`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from pageturner.service.model.decoder_config import DecoderConfig
from pageturner.service.model.products import Layer, OpenLayer, Products
from pageturner.service.model.tensor_parallel.collectives import Collectives, gather_columns
from pageturner.service.model.tensor_parallel.shards import Shard


class ParallelProducts:
    """`Products` of a whole model, of which this rank computes with one shard.

    config: of the whole model. shards: of all ranks. products: of this rank's, as a model of its own. layers:
    of it, made whole.
    """

    def __init__(
        self,
        config: DecoderConfig,
        shards: Sequence[Shard],
        products: Products,
        layers: Iterable[OpenLayer],
        collectives: Collectives,
    ) -> None:
        self.name, self.device = products.name, products.device
        self.dtype, self.kv_dtype = products.dtype, products.kv_dtype
        self.num_parameters = count_parameters(config)
        self.weight_bytes = products.weight_bytes
        self.layers: tuple[Layer[OpenLayer], ...] = tuple(
            Layer(whole, layer.q_norm, layer.k_norm)
            for whole, layer in zip(layers, products.layers, strict=True)
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
