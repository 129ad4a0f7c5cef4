"""Tiny GGUF files, written by the `gguf` package from a transformers model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

# GGUF's names, spelled out here as the format documents them, independent of the converter's table.
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[rest]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def interleave(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of one head in llama.cpp's order: the two halves that rotate together lie side by side."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    architecture: str,
    *,
    changes: dict[str, Any] | None = None,
    extra: dict[str, torch.Tensor] | None = None,
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Float32 weights and a byte-level tokenizer. changes: fields to replace, None to leave one out.
    extra: tensors to add. kinds: how matrices are quantised, by a part of their GGUF name."""
    config: Any = model.config
    writer = gguf.GGUFWriter(path, architecture)
    tokens = ["<|end|>", "<|turn|>", "<tool>", *sorted(gguf_alphabet())][: config.vocab_size]
    tokens += [f"unused{i}" for i in range(config.vocab_size - len(tokens))]
    fields: dict[str, Any] = {
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{architecture}.rope.freq_base": 10_000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 4, *[1] * (len(tokens) - 3)],
        "tokenizer.ggml.merges": ["h e", "l l", "he ll"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 1,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    for key, value in (fields | (changes or {})).items():
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        if architecture == "llama" and ".q_proj" in name:
            tensor = interleave(tensor, config.num_attention_heads)
        if architecture == "llama" and ".k_proj" in name:
            tensor = interleave(tensor, config.num_key_value_heads)
        values = np.ascontiguousarray(tensor.numpy())
        kind = next((kind for part, kind in (kinds or {}).items() if part in gguf_name(name)), None)
        if kind is None or tensor.dim() < 2:
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_alphabet() -> list[str]:
    """The characters that stand for bytes in a byte-level vocabulary, here of printable ASCII and space."""
    return [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ", "he", "ll", "hell"]
