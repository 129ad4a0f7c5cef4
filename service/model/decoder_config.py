"""What the lean decoder can run: a config.json understood in full, or refused.

The family is RMSNorm before attention and MLP, rotary positions, grouped queries and SwiGLU: llama,
mistral, qwen2, qwen3, smollm3. Its members differ in the few fields of `DecoderConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pageturner.service.errors import ModelError
from pageturner.service.model.rope import Rope, parse_rope
from pageturner.service.model.windows import widest


class NotLean(ModelError):
    """The lean decoder does not compute this architecture; `transformers` may."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and switches of one model of the family.

    attention_scale: factor on q.k. qkv_bias, out_bias, mlp_bias: which products add a bias.
    qk_norm: q and k are normed head by head before they are rotated (qwen3).
    sliding_windows: a layer's window in keys, None for all. rotated: whether a layer rotates q and k
    (smollm3 leaves some layers without positions). tied_head: logits reuse the embedding matrix.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    tied_head: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    rotated: tuple[bool, ...]

    @property
    def attention_scale(self) -> float:
        """Factor on q.k: 1 / sqrt(head_dim)."""
        return float(self.head_dim**-0.5)

    @property
    def max_position(self) -> int:
        """Positions that the rope is valid for, hence the longest sequence in tokens."""
        return self.rope.max_position

    @property
    def qkv_sizes(self) -> list[int]:
        """Rows of q, k and v in the merged product."""
        return [heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]


@dataclass(frozen=True, slots=True)
class _Family:
    """How one model_type differs; defaults are those of its transformers configuration class."""

    architecture: str
    windows: Callable[[Mapping[str, Any], int], tuple[int | None, ...]]
    default_kv_heads: int | None = None
    default_theta: float = 10_000.0
    default_tied: bool = False
    takes_attention_bias: bool = False
    takes_mlp_bias: bool = False
    has_qkv_bias: bool = False
    qk_norm: bool = False
    default_nope_interval: int | None = None


def _no_window(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise NotLean("sliding_window is not defined for this architecture")
    return (None,) * num_layers


def _one_window(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    if config.get("layer_types"):
        raise NotLean("a mistral whose layers differ in kind (layer_types)")
    return (_window(config),) * num_layers


def _window_by_layer(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = _window(config) if config.get("use_sliding_window", False) else None
    kinds = config.get("layer_types")
    if kinds is None:
        first = int(config.get("max_window_layers", 28))
        kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise NotLean(f"layer_types {kinds} are not one of full or sliding for each of {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _window(config: Mapping[str, Any]) -> int | None:
    window = config.get("sliding_window", 4096)
    if window is not None and not (isinstance(window, int) and 0 < window < 2**31):
        raise NotLean(f"sliding_window {window!r} is no number of keys")
    return window


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", _no_window, takes_attention_bias=True, takes_mlp_bias=True),
    "mistral": _Family("MistralForCausalLM", _one_window, default_kv_heads=8),
    "qwen2": _Family("Qwen2ForCausalLM", _window_by_layer, default_kv_heads=32, has_qkv_bias=True),
    "qwen3": _Family(
        "Qwen3ForCausalLM", _window_by_layer, default_kv_heads=32, takes_attention_bias=True, qk_norm=True
    ),
    "smollm3": _Family(
        "SmolLM3ForCausalLM",
        _no_window,
        default_kv_heads=4,
        default_theta=2_000_000.0,
        default_tied=True,
        takes_attention_bias=True,
        takes_mlp_bias=True,
        default_nope_interval=4,
    ),
}


def parse_decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a config.json. Raises NotLean, with the reason, for anything the decoder would get wrong."""
    model_type = config.get("model_type")
    family = _FAMILIES.get(str(model_type))
    if family is None:
        raise NotLean(f"model_type {model_type!r} is not of the lean decoder's family")
    architectures = config.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise NotLean(f"architectures {architectures}: only {family.architecture} is known here")
    if config.get("quantization_config"):
        raise NotLean("quantized safetensors (quantization_config)")
    if config.get("hidden_act", "silu") != "silu":
        raise NotLean(f"hidden_act {config['hidden_act']!r} is not silu")
    if (config.get("pretraining_tp") or 1) != 1:
        raise NotLean(f"pretraining_tp {config['pretraining_tp']}")

    hidden_size, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    num_layers = _size(config, "num_hidden_layers")
    num_kv_heads = int(config.get("num_key_value_heads", family.default_kv_heads) or num_heads)
    # qwen3's class has a default head_dim of its own, whatever the hidden size.
    head_dim = int(config.get("head_dim") or (128 if family.qk_norm else hidden_size // num_heads))
    if num_heads % num_kv_heads or head_dim % 2:
        raise NotLean(f"{num_heads} heads over {num_kv_heads} kv heads of {head_dim}")
    max_position = _size(config, "max_position_embeddings")
    attention_bias = bool(config.get("attention_bias", False)) and family.takes_attention_bias
    try:
        rope = parse_rope(config, head_dim, max_position, family.default_theta)
    except ModelError as error:
        raise NotLean(str(error)) from error
    eps = float(config.get("rms_norm_eps", 1e-6))
    if not (math.isfinite(eps) and eps > 0):
        raise NotLean(f"rms_norm_eps {eps}")
    return DecoderConfig(
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=eps,
        rope=rope,
        tied_head=bool(config.get("tie_word_embeddings", family.default_tied)),
        qkv_bias=family.has_qkv_bias or attention_bias,
        out_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and family.takes_mlp_bias,
        qk_norm=family.qk_norm,
        sliding_windows=family.windows(config, num_layers),
        rotated=_rotated(config, family, num_layers),
    )


def family_window(config: Mapping[str, Any]) -> int | None:
    """Keys that a position sees at most in whichever layer sees most; None where one sees everything, and for
    architectures that are not of the family. Raises NotLean for windows that the decoder would get wrong."""
    family = _FAMILIES.get(str(config.get("model_type")))
    return None if family is None else widest(family.windows(config, _size(config, "num_hidden_layers")))


def _rotated(config: Mapping[str, Any], family: _Family, num_layers: int) -> tuple[bool, ...]:
    if family.default_nope_interval is None:
        return (True,) * num_layers
    flags = config.get("no_rope_layers")  # 1 where a layer does rotate, whatever the name says
    if flags is None:
        interval = int(config.get("no_rope_layer_interval", family.default_nope_interval))
        flags = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if len(flags) < num_layers:
        raise NotLean(f"no_rope_layers names {len(flags)} of {num_layers} layers")
    return tuple(bool(flag) for flag in flags[:num_layers])


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise NotLean(f"{key}: {value!r} is not a positive integer")
    return value
