"""Tiny causal models with random weights, one of each family, in float32.

Weights are drawn wide enough that every part of a layer moves the logits (the initialisation that
training starts from leaves attention nearly uniform, and would hide a wrong mask).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 128
MAX_POSITIONS = 256

_MODERN: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEAD_DIM: dict[str, Any] = {"head_dim": 8}
_OLD: dict[str, Any] = {key: value for key, value in _MODERN.items() if key != "num_key_value_heads"}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "factor": 8.0,
}
_FULL_AND_WINDOW = ["sliding_attention", "full_attention"]

# family -> (transformers model type, what its configuration adds)
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _MODERN | _HEAD_DIM),
    "llama_bias": ("llama", _MODERN | _HEAD_DIM | {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("llama", _MODERN | _HEAD_DIM | {"tie_word_embeddings": True}),
    "llama3_rope": ("llama", _MODERN | _HEAD_DIM | {"rope_parameters": _LLAMA3_ROPE}),
    "mistral": ("mistral", _MODERN | _HEAD_DIM | {"sliding_window": None}),
    "mistral_window": ("mistral", _MODERN | _HEAD_DIM | {"sliding_window": 7}),
    "qwen2": ("qwen2", _MODERN),
    "qwen2_window": (
        "qwen2",
        _MODERN | {"use_sliding_window": True, "sliding_window": 5, "layer_types": _FULL_AND_WINDOW},
    ),
    "qwen3": ("qwen3", _MODERN | _HEAD_DIM),
    "qwen3_moe": (
        "qwen3_moe",
        _MODERN | _HEAD_DIM | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "smollm3": ("smollm3", _MODERN),
    "mixtral": ("mixtral", _MODERN | _HEAD_DIM | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi": ("phi", _MODERN),
    "phi3": ("phi3", _MODERN | {"sliding_window": 9}),
    "phi3_longrope": (
        "phi3",
        _MODERN | {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64},
    ),
    "llama_dynamic_rope": (
        "llama",
        _MODERN
        | _HEAD_DIM
        | {
            "max_position_embeddings": 24,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "gemma": ("gemma", _MODERN | _HEAD_DIM | {"tie_word_embeddings": True}),
    "gemma2": (
        "gemma2",
        _MODERN
        | _HEAD_DIM
        | {
            "sliding_window": 6,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
            "layer_types": _FULL_AND_WINDOW,
        },
    ),
    "gemma3": (
        "gemma3_text",
        _MODERN
        | _HEAD_DIM
        | {"sliding_window": 6, "query_pre_attn_scalar": 16, "layer_types": _FULL_AND_WINDOW},
    ),
    "gpt2": ("gpt2", _GPT2),
    "gpt_neox": ("gpt_neox", _OLD),
    "gptj": ("gptj", _GPT2 | {"rotary_dim": 4}),
    "gpt_bigcode": ("gpt_bigcode", _GPT2 | {"multi_query": True}),
    "codegen": ("codegen", _GPT2 | {"rotary_dim": 4}),
    "opt": ("opt", _OLD | {"ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 0}),
    "olmo2": ("olmo2", _MODERN),
    "olmo3": ("olmo3", _MODERN | {"sliding_window": 5, "layer_types": _FULL_AND_WINDOW}),
    "starcoder2": ("starcoder2", _MODERN | {"sliding_window": 8}),
    "granite": ("granite", _MODERN | {"attention_multiplier": 0.2, "residual_multiplier": 0.5}),
    "cohere": ("cohere", _MODERN),
    "cohere2": ("cohere2", _MODERN | {"sliding_window": 5, "layer_types": _FULL_AND_WINDOW}),
    "glm4": ("glm4", _MODERN | _HEAD_DIM | {"pad_token_id": 0}),
    "gpt_oss": (
        "gpt_oss",
        _MODERN
        | _HEAD_DIM
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "layer_types": _FULL_AND_WINDOW,
        },
    ),
    "llama4": (
        "llama4_text",
        _MODERN
        | _HEAD_DIM
        | {
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "pad_token_id": 0,
        },
    ),
    "exaone4": (
        "exaone4",
        _MODERN | _HEAD_DIM | {"sliding_window": 5, "layer_types": _FULL_AND_WINDOW},
    ),
    "helium": ("helium", _MODERN | _HEAD_DIM),
    "persimmon": ("persimmon", _OLD),
    "biogpt": ("biogpt", _OLD | {"pad_token_id": 0}),
    "stablelm": ("stablelm", _MODERN),
    "nemotron": ("nemotron", _MODERN | _HEAD_DIM),
    "deepseek_v3": (
        "deepseek_v3",
        _MODERN
        | {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "bloom": ("bloom", {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": ("falcon", _OLD | {"new_decoder_architecture": False, "multi_query": True}),
    "mpt": (
        "mpt",
        {
            "vocab_size": VOCAB_SIZE,
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": MAX_POSITIONS,
        },
    ),
    "gpt_neo": (
        "gpt_neo",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 6,
            "max_position_embeddings": MAX_POSITIONS,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}

FAMILIES: tuple[str, ...] = tuple(_FAMILIES)

_from_config: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of a tiny model of the family, with some values replaced."""
    model_type, options = _FAMILIES[family]
    return AutoConfig.for_model(model_type, **(options | changes))


def tiny_model(family: str, seed: int, **changes: Any) -> tuple[PreTrainedConfig, PreTrainedModel]:
    """A float32 model of the family, its weights a function of the seed alone."""
    config = tiny_config(family, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * (0.5 if "embed" in name else 0.25))
            else:
                parameter.add_(noise * 0.1)
    model.requires_grad_(False)
    torch.nn.Module.eval(model)
    return config, model


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Write config.json and model.safetensors as `transformers` does; returns the folder."""
    model.save_pretrained(folder)
    return folder
