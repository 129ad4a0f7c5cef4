"""A decoder's products from float weights: by oneDNN on the CPU, torch's own on a GPU (see `linear`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name every reader of torch expects

from pageturner.kernels.interface import PagedOps
from pageturner.service.model.decoder_config import DecoderConfig
from pageturner.service.model.linear import HEAD_ROW_TILES, Linear, LinearFactory
from pageturner.service.model.packing import check_left
from pageturner.service.model.products import Add, Layer, OpenLayer, Projection
from pageturner.service.model.weight_source import WeightSource

Take = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class _DenseLayer:
    """A layer's weights, and the operations between its products."""

    ops: PagedOps
    eps: float
    attention_norm: torch.Tensor
    merged: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    def qkv(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.ops.rms_norm(hidden, self.attention_norm, self.eps, residual)
        return self.merged(normed), residual

    def out(self, attended: torch.Tensor) -> torch.Tensor:
        return self.output(attended)

    def mlp(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.ops.rms_norm(hidden, self.mlp_norm, self.eps, residual)
        return self.down(self.ops.silu_and_mul(self.gate_up(normed))), residual

    def project(self, name: Projection, rows: torch.Tensor, add: Add) -> torch.Tensor:
        products = {"qkv": self.merged, "out": self.output, "gate_up": self.gate_up, "down": self.down}
        product = products[name](rows)
        add(product, rows)
        return product


class DenseProducts:
    """`Products` in one float dtype, that of the activations too.

    layers: kept in memory, or (see `StreamedLayers`) read anew each time.
    """

    def __init__(
        self,
        config: DecoderConfig,
        ops: PagedOps,
        embedding: torch.Tensor,
        layers: Sequence[Layer[OpenLayer]] | StreamedLayers,
        norm: torch.Tensor,
        head: Linear,
        num_parameters: int,
        kv_dtype: torch.dtype,
    ) -> None:
        self.dtype, self.kv_dtype = embedding.dtype, kv_dtype
        self.name = str(self.dtype).removeprefix("torch.")
        self.device = embedding.device
        self.layers = layers
        self.num_parameters = num_parameters
        self._embedding, self._norm, self._head = embedding, norm, head
        self._ops, self._eps = ops, config.rms_norm_eps

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * self.dtype.itemsize

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self._embedding)

    def head(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        normed, _ = self._ops.rms_norm(hidden, self._norm, self._eps, residual)
        return self._head(normed)


class StreamedLayers:
    """Layers that are read when their turn comes and forgotten after it: for one pass over a model that
    doesn't fit in memory in this dtype."""

    def __init__(self, read: Callable[[int], Layer[OpenLayer]], num_layers: int) -> None:
        self._read, self._num_layers = read, num_layers

    def __iter__(self) -> Iterator[Layer[OpenLayer]]:
        return map(self._read, range(self._num_layers))


def load_dense_products(
    config: DecoderConfig,
    weights: WeightSource,
    ops: PagedOps,
    dtype: torch.dtype,
    *,
    kv_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    device: torch.device | None = None,
    streamed: bool = False,
) -> DenseProducts:
    """Read, merge and pack the weights, on the device (by default the CPU).

    kv_dtype: of the pool, by default `dtype`. streamed: layers are read anew in each forward, and no memory
    holds them between. Raises ModelError if a weight is missing, has the wrong shape or is not one of this
    architecture, or if deterministic products cannot be had on this machine.
    """
    num_parameters = 0

    def take(name: str, *shape: int) -> torch.Tensor:
        nonlocal num_parameters
        tensor = weights.take(name, shape)
        num_parameters += tensor.numel()
        return tensor.to(device, dtype)

    embedding = take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    make = LinearFactory(deterministic=deterministic)

    def read(index: int) -> Layer[OpenLayer]:
        return _load_layer(config, index, take, make, ops)

    layers = StreamedLayers(read, config.num_layers) if streamed else [*map(read, range(config.num_layers))]
    norm = take("model.norm.weight", config.hidden_size)
    head_weight = (
        embedding if config.tied_head else take("lm_head.weight", config.vocab_size, config.hidden_size)
    )
    if not streamed:
        check_left(weights, config)
    head = make(head_weight, candidates=HEAD_ROW_TILES)
    return DenseProducts(config, ops, embedding, layers, norm, head, num_parameters, kv_dtype or dtype)


def _load_layer(
    config: DecoderConfig, index: int, take: Take, make: LinearFactory, ops: PagedOps
) -> Layer[OpenLayer]:
    prefix = f"model.layers.{index}."
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, k_size, v_size = config.qkv_sizes

    def merged(names: Sequence[str], sizes: Sequence[int], width: int, *, bias: bool) -> Linear:
        weight = torch.cat(
            [take(f"{prefix}{n}.weight", size, width) for n, size in zip(names, sizes, strict=True)]
        )
        if not bias:
            return make(weight)
        return make(
            weight, torch.cat([take(f"{prefix}{n}.bias", size) for n, size in zip(names, sizes, strict=True)])
        )

    def norm(name: str, size: int) -> torch.Tensor:
        return take(f"{prefix}{name}.weight", size).clone()

    products = _DenseLayer(
        ops,
        config.rms_norm_eps,
        attention_norm=norm("input_layernorm", hidden),
        merged=merged(
            [f"self_attn.{part}_proj" for part in "qkv"],
            (q_size, k_size, v_size),
            hidden,
            bias=config.qkv_bias,
        ),
        output=merged(["self_attn.o_proj"], [hidden], q_size, bias=config.out_bias),
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate_up=merged(["mlp.gate_proj", "mlp.up_proj"], [inner, inner], hidden, bias=config.mlp_bias),
        down=merged(["mlp.down_proj"], [hidden], inner, bias=config.mlp_bias),
    )
    return Layer(
        products,
        q_norm=norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
    )
