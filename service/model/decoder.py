"""The lean decoder: one forward for llama, mistral, qwen2, qwen3 and smollm3.

Each layer is norm, attention, norm, SwiGLU, with q, k and v in one product and gate and up in another.
Residual additions are fused into the norm that follows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name every reader of torch expects

from pageturner.kernels.interface import AttentionSpec, PagedOps
from pageturner.service.errors import ModelError
from pageturner.service.model.batch import ForwardBatch
from pageturner.service.model.decoder_config import DecoderConfig
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.model.linear import HEAD_ROW_TILES, Linear, LinearFactory
from pageturner.service.model.loader import WeightFiles


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights. rotated: whether positions turn q and k. q_norm, k_norm: qwen3's."""

    attention_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    rotated: bool
    attention: AttentionSpec
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """A `CausalModel` of the family that `DecoderConfig` describes.

    Made by `load_decoder`. ops decides where attention, norms and activations run.
    """

    backend = "lean"

    def __init__(
        self,
        config: DecoderConfig,
        embedding: torch.Tensor,
        layers: Sequence[_Layer],
        norm: torch.Tensor,
        head: Linear,
        rope_table: tuple[torch.Tensor, torch.Tensor],
        ops: PagedOps,
        num_parameters: int,
    ) -> None:
        self.config = config
        self.num_layers, self.num_heads, self.num_kv_heads = (
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
        )
        self.head_dim, self.vocab_size = config.head_dim, config.vocab_size
        self.max_position = rope_table[0].shape[0]
        self.num_parameters = num_parameters
        self.dtype, self.device = embedding.dtype, embedding.device
        self._embedding = embedding
        self._layers = tuple(layers)
        self._norm = norm
        self._head = head
        self._cos, self._sin = rope_table
        self._ops = ops

    def forward(self, batch: ForwardBatch, kv_cache: KvCache) -> torch.Tensor:
        """Write the KV of every row with a slot; logits [len(batch.logit_rows), vocab_size]."""
        ops, eps = self._ops, self.config.rms_norm_eps
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        hidden, residual = F.embedding(batch.token_ids, self._embedding), None
        for index, layer in enumerate(self._layers):
            normed, residual = ops.rms_norm(hidden, layer.attention_norm, eps, residual)
            attended = self._attend(layer, normed, cos, sin, batch, kv_cache.layer(index))
            normed, residual = ops.rms_norm(layer.out(attended), layer.mlp_norm, eps, residual)
            hidden = layer.down(ops.silu_and_mul(layer.gate_up(normed)))
        rows = batch.logit_rows
        if not len(rows):
            return hidden.new_empty(0, self.vocab_size)
        assert residual is not None, "a model has at least one layer"
        normed, _ = ops.rms_norm(hidden[rows], self._norm, eps, residual[rows])
        return self._head(normed)

    def _attend(
        self,
        layer: _Layer,
        normed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: ForwardBatch,
        kv_layer: torch.Tensor,
    ) -> torch.Tensor:
        ops, eps = self._ops, self.config.rms_norm_eps
        rows = normed.shape[0]
        query, key, value = (
            part.view(rows, -1, self.head_dim)
            for part in torch.split(layer.qkv(normed), self.config.qkv_sizes, dim=-1)
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            query, _ = ops.rms_norm(query, layer.q_norm, eps)
            key, _ = ops.rms_norm(key, layer.k_norm, eps)
        if layer.rotated:
            query = ops.rope_and_write_kv(query, key, value, cos, sin, kv_layer, batch.attention)
        else:
            ops.write_kv(key, value, kv_layer, batch.attention)
        return ops.attention(query, kv_layer, batch.attention, layer.attention).flatten(1)


def load_decoder(
    config: DecoderConfig,
    weights: WeightFiles,
    ops: PagedOps,
    dtype: torch.dtype,
    *,
    max_position: int | None = None,
    deterministic: bool = False,
    device: torch.device | None = None,
) -> Decoder:
    """Read, merge and pack the weights, on the device (by default the CPU).

    max_position: the longest sequence, at most and by default the model's. Raises ModelError if a weight
    is missing, has the wrong shape or is not one of this architecture, or if deterministic products
    cannot be had on this machine.
    """
    num_parameters = 0

    def take(name: str, *shape: int) -> torch.Tensor:
        nonlocal num_parameters
        tensor = weights.take(name, shape)
        num_parameters += tensor.numel()
        return tensor.to(device, dtype)

    embedding = take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    make = LinearFactory(deterministic=deterministic)
    layers = [_load_layer(config, index, take, make) for index in range(config.num_layers)]
    norm = take("model.norm.weight", config.hidden_size)
    head_weight = (
        embedding if config.tied_head else take("lm_head.weight", config.vocab_size, config.hidden_size)
    )
    _check_left(weights, config)
    positions = config.max_position if max_position is None else min(max_position, config.max_position)
    return Decoder(
        config,
        embedding,
        layers,
        norm,
        make(head_weight, candidates=HEAD_ROW_TILES),
        config.rope.table(positions, device),
        ops,
        num_parameters,
    )


def _load_layer(
    config: DecoderConfig, index: int, take: Callable[..., torch.Tensor], make: LinearFactory
) -> _Layer:
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

    return _Layer(
        attention_norm=norm("input_layernorm", hidden),
        qkv=merged(
            [f"self_attn.{part}_proj" for part in "qkv"],
            (q_size, k_size, v_size),
            hidden,
            bias=config.qkv_bias,
        ),
        q_norm=norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
        rotated=config.rotated[index],
        attention=AttentionSpec(config.attention_scale, config.sliding_windows[index]),
        out=merged(["self_attn.o_proj"], [hidden], q_size, bias=config.out_bias),
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate_up=merged(["mlp.gate_proj", "mlp.up_proj"], [inner, inner], hidden, bias=config.mlp_bias),
        down=merged(["mlp.down_proj"], [hidden], inner, bias=config.mlp_bias),
    )


def _check_left(weights: WeightFiles, config: DecoderConfig) -> None:
    """A weight that this forward does not use is a part of the model that it would leave out."""
    harmless = {"lm_head.weight"} if config.tied_head else set()
    left = [
        name for name in weights.left() if name not in harmless and not name.endswith("rotary_emb.inv_freq")
    ]
    if left:
        raise ModelError(f"{len(left)} weights have no place in this architecture, such as {left[0]}")
