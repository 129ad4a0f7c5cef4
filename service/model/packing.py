"""A model's weights, quantised and packed, each product's as one: q with k and v, gate with up.

What `quantised_products` reads at each start; the names are those below, the norms' as in the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from pageturner.kernels.grouped import GroupedWeight, concatenate
from pageturner.kernels.packed import pack
from pageturner.service.errors import ModelError
from pageturner.service.model.decoder_config import DecoderConfig
from pageturner.service.model.packed_file import PackedWriter
from pageturner.service.model.quantise import GROUP, SCHEMES, check_finite
from pageturner.service.model.weight_source import WeightSource

EMBEDDING, HEAD = "embedding", "head"
FILE_SCHEME = "file"
"""The groups that the file has, where it has them; int8 of what else there is."""


class NotPackable(ModelError):
    """Groups don't divide the sizes of the model."""


def check_packable(config: DecoderConfig) -> None:
    """Raise NotPackable for a model that can't be quantised in groups."""
    for name, size in (
        ("hidden_size", config.hidden_size),
        ("intermediate_size", config.intermediate_size),
        ("num_heads * head_dim", config.qkv_sizes[0]),
    ):
        if size % GROUP:
            raise NotPackable(f"{name} is {size}, no multiple of the {GROUP} inputs of a group")


def write_packed(config: DecoderConfig, source: WeightSource, scheme: str, folder: Path) -> None:
    """Quantise and pack all weights of the model into the folder. scheme: FILE_SCHEME, int8 or int4.

    Raises ModelError for a weight that is missing, misshapen, damaged or not finite, or that this
    architecture has no place for, NotPackable for a model of other sizes, and OSError.
    """
    check_packable(config)
    q_size = config.qkv_sizes[0]
    hidden, inner = config.hidden_size, config.intermediate_size
    with PackedWriter(folder) as writer:

        def product(name: str, parts: Sequence[tuple[str, int]], width: int, *, bias: bool) -> None:
            weight = concatenate(
                [_groups(source, f"{part}.weight", (size, width), scheme) for part, size in parts]
            )
            biases = [_plain(source, f"{part}.bias", size) for part, size in parts] if bias else []
            writer.add_packed(name, pack(weight, torch.cat(biases) if bias else None))

        def plain(name: str, size: int) -> None:
            writer.add(f"{name}.weight", _plain(source, f"{name}.weight", size))

        for index in range(config.num_layers):
            layer = f"model.layers.{index}"
            attention = f"{layer}.self_attn"
            plain(f"{layer}.input_layernorm", hidden)
            if config.qk_norm:
                plain(f"{attention}.q_norm", config.head_dim)
                plain(f"{attention}.k_norm", config.head_dim)
            sizes = [
                (f"{attention}.{part}_proj", size) for part, size in zip("qkv", config.qkv_sizes, strict=True)
            ]
            product(f"{layer}.qkv", sizes, hidden, bias=config.qkv_bias)
            product(f"{layer}.out", [(f"{attention}.o_proj", hidden)], q_size, bias=config.out_bias)
            plain(f"{layer}.post_attention_layernorm", hidden)
            gate_up = [(f"{layer}.mlp.{part}_proj", inner) for part in ("gate", "up")]
            product(f"{layer}.gate_up", gate_up, hidden, bias=config.mlp_bias)
            product(f"{layer}.down", [(f"{layer}.mlp.down_proj", hidden)], inner, bias=config.mlp_bias)
        plain("model.norm", hidden)
        # As llama.cpp does: what chooses the token, and what it is read from, keep 8 bits.
        at_ends = "int8" if scheme == "int4" else scheme
        shape = (config.vocab_size, hidden)
        embedding = _groups(source, "model.embed_tokens.weight", shape, at_ends)
        writer.add_packed(EMBEDDING, pack(embedding))
        if not config.tied_head:
            writer.add_packed(HEAD, pack(_groups(source, "lm_head.weight", shape, at_ends)))
    check_left(source, config)


def check_left(source: WeightSource, config: DecoderConfig) -> None:
    """Raise ModelError for a weight never taken: a part of the model that would be left out."""
    harmless = {"lm_head.weight"} if config.tied_head else set()
    left = [
        name for name in source.left() if name not in harmless and not name.endswith("rotary_emb.inv_freq")
    ]
    if left:
        raise ModelError(f"{len(left)} weights have no place in this architecture, such as {left[0]}")


def _groups(source: WeightSource, name: str, shape: tuple[int, int], scheme: str) -> GroupedWeight:
    if scheme == FILE_SCHEME:
        groups = source.take_groups(name, shape)
        if groups is not None:
            return groups
        scheme = "int8"
    return SCHEMES[scheme](check_finite(name, source.take(name, shape)))


def _plain(source: WeightSource, name: str, size: int) -> torch.Tensor:
    return check_finite(name, source.take(name, (size,)).float())
