"""A decoder's products from weights in groups of integers, times activations quantised as they come.

Activations between products are float32; a row's bits depend on its own tokens alone (see
`kernels.interface.QuantisedOps`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pageturner.kernels.cpu.forward import DecoderWeights, LayerWeights
from pageturner.kernels.interface import AttentionSpec, QuantisedOps
from pageturner.kernels.known_tokens import KnownTokens, TokenScores
from pageturner.kernels.packed import PackedWeight, rows_of
from pageturner.service.model.decoder_config import DecoderConfig
from pageturner.service.model.packed_file import PackedSource
from pageturner.service.model.packing import EMBEDDING, HEAD
from pageturner.service.model.products import PROJECTIONS, Add, Layer, Projection


@dataclass(frozen=True, slots=True)
class LayerShapes:
    """[out, in] of each product of a layer."""

    qkv: tuple[int, int]
    out: tuple[int, int]
    gate_up: tuple[int, int]
    down: tuple[int, int]


def layer_shapes(config: DecoderConfig) -> LayerShapes:
    """Those of a whole model."""
    hidden, inner, q_size = config.hidden_size, config.intermediate_size, config.qkv_sizes[0]
    return LayerShapes(
        (sum(config.qkv_sizes), hidden), (hidden, q_size), (2 * inner, hidden), (hidden, inner)
    )


@dataclass(frozen=True, slots=True)
class QuantisedLayer:
    """A layer's packed weights, and what multiplies them."""

    ops: QuantisedOps
    eps: float
    attention_norm: torch.Tensor
    merged: PackedWeight
    output: PackedWeight
    mlp_norm: torch.Tensor
    gate_up: PackedWeight
    down: PackedWeight

    def qkv(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ops.norm_linear(hidden, self.attention_norm, self.eps, self.merged, residual)

    def out(self, attended: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(attended, self.output)

    def mlp(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ops.norm_mlp(hidden, self.mlp_norm, self.eps, self.gate_up, self.down, residual)

    def project(self, name: Projection, rows: torch.Tensor, add: Add) -> torch.Tensor:
        product = self.ops.linear(rows, self._weight(name))
        add(product, rows)
        return product

    @property
    def row_groups(self) -> tuple[int, ...]:
        """Of PROJECTIONS, inputs that share a scale where the rows are quantised."""
        return tuple(self._weight(name).layout.group for name in PROJECTIONS)

    def _weight(self, name: Projection) -> PackedWeight:
        weights = {"qkv": self.merged, "out": self.output, "gate_up": self.gate_up, "down": self.down}
        return weights[name]


class QuantisedProducts:
    """`Products` on the CPU. name: as the scheme is called."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(
        self,
        name: str,
        config: DecoderConfig,
        ops: QuantisedOps,
        embedding: PackedWeight,
        layers: tuple[Layer[QuantisedLayer], ...],
        norm: torch.Tensor,
        head: PackedWeight,
        kv_dtype: torch.dtype,
    ) -> None:
        self.name, self.kv_dtype, self.layers = name, kv_dtype, layers
        self.num_parameters, self.weight_bytes = _count(config, embedding, layers, head)
        self._ops, self._eps = ops, config.rms_norm_eps
        self._embedding, self._norm, self._head = embedding, norm, head

    def whole_weights(
        self,
        config: DecoderConfig,
        attention: Sequence[AttentionSpec],
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> DecoderWeights:
        """For a forward in one call. attention: of each layer. cos, sin: of each position."""
        layers = []
        for index, layer in enumerate(self.layers):
            products = layer.products
            layers.append(
                LayerWeights(
                    attention_norm=products.attention_norm,
                    qkv=products.merged,
                    q_norm=layer.q_norm,
                    k_norm=layer.k_norm,
                    rotated=config.rotated[index],
                    attention=attention[index],
                    out=products.output,
                    mlp_norm=products.mlp_norm,
                    gate_up=products.gate_up,
                    down=products.down,
                )
            )
        return DecoderWeights(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rms_norm_eps,
            self._embedding,
            tuple(layers),
            self._norm,
            self._head,
            cos,
            sin,
        )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return rows_of(self._embedding, token_ids)

    def head(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        logits, _ = self._ops.norm_linear(hidden, self._norm, self._eps, self._head, residual)
        return logits

    def scores(self, hidden: torch.Tensor, residual: torch.Tensor, known: KnownTokens) -> TokenScores:
        """What the logits of some rows say of known tokens."""
        return self._ops.norm_scores(hidden, self._norm, self._eps, self._head, known, residual)


def load_quantised_products(
    name: str,
    config: DecoderConfig,
    weights: PackedSource,
    ops: QuantisedOps,
    kv_dtype: torch.dtype,
    shapes: LayerShapes | None = None,
) -> QuantisedProducts:
    """Map what `packing.write_packed` wrote. shapes: of a layer's products, those of the config by default.

    Raises ModelError if it is another model's.
    """
    shapes = shapes or layer_shapes(config)
    shape = (config.vocab_size, config.hidden_size)
    embedding = weights.take_packed(EMBEDDING, *shape)
    head = embedding if config.tied_head else weights.take_packed(HEAD, *shape)
    layers = tuple(_load_layer(config, shapes, index, weights, ops) for index in range(config.num_layers))
    norm = weights.take("model.norm.weight", (config.hidden_size,))
    return QuantisedProducts(name, config, ops, embedding, layers, norm, head, kv_dtype)


def _load_layer(
    config: DecoderConfig, shapes: LayerShapes, index: int, weights: PackedSource, ops: QuantisedOps
) -> Layer[QuantisedLayer]:
    layer = f"model.layers.{index}"

    def norm(name: str, size: int) -> torch.Tensor:
        return weights.take(f"{layer}.{name}.weight", (size,))

    def product(name: str, shape: tuple[int, int], *, bias: bool) -> PackedWeight:
        return weights.take_packed(f"{layer}.{name}", *shape, bias=bias)

    products = QuantisedLayer(
        ops,
        config.rms_norm_eps,
        attention_norm=norm("input_layernorm", config.hidden_size),
        merged=product("qkv", shapes.qkv, bias=config.qkv_bias),
        output=product("out", shapes.out, bias=config.out_bias),
        mlp_norm=norm("post_attention_layernorm", config.hidden_size),
        gate_up=product("gate_up", shapes.gate_up, bias=config.mlp_bias),
        down=product("down", shapes.down, bias=config.mlp_bias),
    )
    return Layer(
        products,
        q_norm=norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
    )


def _count(
    config: DecoderConfig,
    embedding: PackedWeight,
    layers: tuple[Layer[QuantisedLayer], ...],
    head: PackedWeight,
) -> tuple[int, int]:
    """Parameters, and the bytes that hold them."""
    packed = [embedding] if head is embedding else [embedding, head]
    plain = [config.hidden_size]
    for layer in layers:
        products = layer.products
        packed += [products.merged, products.output, products.gate_up, products.down]
        norms = (products.attention_norm, products.mlp_norm, layer.q_norm, layer.k_norm)
        plain += [norm.numel() for norm in norms if norm is not None]
    plain += [weight.bias.numel() for weight in packed if weight.bias is not None]
    parameters = sum(weight.layout.out_features * weight.layout.in_features for weight in packed)
    num_bytes = sum(weight.buffer.numel() for weight in packed)
    return parameters + sum(plain), num_bytes + 4 * sum(plain)
