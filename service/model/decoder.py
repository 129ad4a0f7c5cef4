"""The lean decoder: one forward for llama, mistral, qwen2, qwen3 and smollm3.

Each layer is norm, attention, norm, SwiGLU, with q, k and v in one product and gate and up in another.
Residual additions are fused into the norm that follows them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from pageturner.kernels.cpu.low_rank import CpuLowRankOps
from pageturner.kernels.cpu.ops import CpuOps
from pageturner.kernels.cpu.packed_low_rank import CpuPackedLowRankOps
from pageturner.kernels.interface import AttentionSpec, PagedOps
from pageturner.kernels.known_tokens import KnownTokens, TokenScores
from pageturner.kernels.low_rank import LowRankBackend, LowRankOps
from pageturner.kernels.packed import TILE
from pageturner.kernels.torch_low_rank import TorchLowRankOps
from pageturner.service.errors import AdapterError
from pageturner.service.model.adapted_layer import AdaptedLayer
from pageturner.service.model.adapter_store import BatchAdapters
from pageturner.service.model.adapters import AdapterShapes, AdapterWeights, read_adapter
from pageturner.service.model.batch import ForwardBatch
from pageturner.service.model.decoder_config import DecoderConfig
from pageturner.service.model.dense_products import load_dense_products
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.model.products import Layer, LayerProducts, OpenLayer, Products
from pageturner.service.model.quantised_products import QuantisedProducts
from pageturner.service.model.scores import ScoredRows, score_hidden
from pageturner.service.model.upload import upload
from pageturner.service.model.weight_source import WeightSource
from pageturner.service.model.windows import widest


class Decoder:
    """A `CausalModel` of the family that `DecoderConfig` describes.

    products: its weights, and what multiplies them. ops decides where attention, norms and activations run.
    low_rank: what adapters are prepared for, and added by. row_groups: of `AdapterShapes`.
    max_position: the longest sequence, at most and by default the model's.
    """

    backend = "lean"

    def __init__(
        self, config: DecoderConfig, products: Products, ops: PagedOps, max_position: int | None = None
    ) -> None:
        self.config = config
        self.products = products
        self.num_layers, self.num_heads, self.num_kv_heads = (
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
        )
        self.total_kv_heads = config.num_kv_heads
        self.head_dim, self.vocab_size = config.head_dim, config.vocab_size
        self.dtype, self.kv_dtype, self.device = products.dtype, products.kv_dtype, products.device
        self.num_parameters, self.weight_bytes = products.num_parameters, products.weight_bytes
        positions = config.max_position if max_position is None else min(max_position, config.max_position)
        self.max_position = positions
        self.window = widest(config.sliding_windows)
        self._cos, self._sin = config.rope.table(positions, self.device)
        self._attention = tuple(
            AttentionSpec(config.attention_scale, window) for window in config.sliding_windows
        )
        self._ops = ops
        self.low_rank, self.row_groups = low_rank_ops(products, ops, config.qkv_sizes)

    def read_adapter(self, folder: Path, max_rank: int, max_bytes: int) -> AdapterWeights:
        """What a folder holds, on the model's device and as its products take it; one of several ranks has
        its part. Raises AdapterError, also where there is no memory for it."""
        shapes = self._adapter_shapes(max_rank, max_bytes)
        try:
            return read_adapter(folder, shapes, self.low_rank, self.device)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise AdapterError(f"there is no memory for it on {self.device}") from error

    def _adapter_shapes(self, max_rank: int, max_bytes: int) -> AdapterShapes:
        return AdapterShapes(self.config, max_rank, max_bytes, self.row_groups)

    def forward(self, batch: ForwardBatch, kv_cache: KvCache) -> torch.Tensor:
        """Write the KV of every row with a slot; logits [len(batch.logit_rows), vocab_size]."""
        return self._logits(*self._computed(batch, kv_cache), batch.logit_rows)

    def forward_scored(
        self, batch: ForwardBatch, kv_cache: KvCache, scored: ScoredRows
    ) -> tuple[torch.Tensor, TokenScores]:
        """As `ScoringModel` has it; the logits of a few rows at a time."""
        hidden, residual = self._computed(batch, kv_cache)
        sampled, places = (
            batch.logit_rows[each] for each in upload((scored.sampled, scored.places), self.device)
        )
        logits = self._logits(hidden, residual, sampled)
        return logits, self._scores(hidden[places], residual[places], scored.known)

    def _logits(self, hidden: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if not len(rows):
            return hidden.new_empty(0, self.vocab_size)
        return self.products.head(hidden[rows], residual[rows])

    def _scores(self, hidden: torch.Tensor, residual: torch.Tensor, known: KnownTokens) -> TokenScores:
        head = self.products.head
        return score_hidden(lambda rows: head(hidden[rows], residual[rows]), known, hidden.device)

    def _computed(self, batch: ForwardBatch, kv_cache: KvCache) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows behind the last layer: (what it adds to the residual, residual)."""
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        hidden, residual = self.products.embed(batch.token_ids), None
        for index, layer in enumerate(self.products.layers):
            products: LayerProducts = layer.products
            if batch.adapters is not None:
                products = self._adapted(index, layer, batch.adapters)
            qkv, residual = products.qkv(hidden, residual)
            attended = self._attend(index, layer, qkv, cos, sin, batch, kv_cache.layer(index))
            hidden, residual = products.mlp(products.out(attended), residual)
        assert residual is not None, "a model has at least one layer"
        return hidden, residual

    def _adapted(self, index: int, layer: Layer[OpenLayer], adapters: BatchAdapters) -> LayerProducts:
        return AdaptedLayer(layer.products, index, self._ops, self.low_rank, adapters)

    def _attend(
        self,
        index: int,
        layer: Layer[OpenLayer],
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: ForwardBatch,
        kv_layer: torch.Tensor,
    ) -> torch.Tensor:
        ops, eps = self._ops, self.config.rms_norm_eps
        query, key, value = (
            part.view(len(qkv), -1, self.head_dim) for part in torch.split(qkv, self.config.qkv_sizes, dim=-1)
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            query, _ = ops.rms_norm(query, layer.q_norm, eps)
            key, _ = ops.rms_norm(key, layer.k_norm, eps)
        if self.config.rotated[index]:
            query = ops.rope_and_write_kv(query, key, value, cos, sin, kv_layer, batch.attention)
        else:
            ops.write_kv(key, value, kv_layer, batch.attention)
        return ops.attention(query, kv_layer, batch.attention, self._attention[index]).flatten(1)


def low_rank_ops(
    products: Products, ops: PagedOps, sizes: Iterable[int]
) -> tuple[LowRankOps, tuple[tuple[int, ...], ...]]:
    """What adds adapters to these products, and the groups of their rows. sizes: outputs of all parts of all
    products that may not be multiples of TILE."""
    if isinstance(ops, LowRankBackend):
        return ops.low_rank_ops(products.dtype), ()
    if not isinstance(ops, CpuOps):
        return TorchLowRankOps(products.dtype), ()
    if isinstance(products, QuantisedProducts) and not any(size % TILE for size in sizes):
        return CpuPackedLowRankOps(ops.library), tuple(layer.products.row_groups for layer in products.layers)
    return CpuLowRankOps(ops.library), ()


def load_decoder(
    config: DecoderConfig,
    weights: WeightSource,
    ops: PagedOps,
    dtype: torch.dtype,
    *,
    max_position: int | None = None,
    deterministic: bool = False,
    device: torch.device | None = None,
    kv_dtype: torch.dtype | None = None,
    streamed: bool = False,
) -> Decoder:
    """The decoder in one float dtype; see `load_dense_products`."""
    products = load_dense_products(
        config,
        weights,
        ops,
        dtype,
        kv_dtype=kv_dtype,
        deterministic=deterministic,
        device=device,
        streamed=streamed,
    )
    return Decoder(config, products, ops, max_position)
