"""A GGUF file written out as the folder that `transformers` would have saved.

Done once a file: afterwards a start maps safetensors and never parses or dequantises again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from pageturner.service.errors import ModelError
from pageturner.service.model.decoder_config import parse_decoder_config
from pageturner.service.model.gguf import GgufFile
from pageturner.service.model.gguf_tokenizer import adds_bos, build_tokenizer, end_ids, special_ids
from pageturner.service.model.gguf_weights import ROPE_FACTORS, GgufWeights
from pageturner.service.model.packing import check_packable, write_packed
from pageturner.service.model.rope import parse_rope

SHARD_BYTES = 2 << 30
_CHAT_TEMPLATE = "tokenizer.chat_template"


@dataclass(frozen=True, slots=True)
class _Architecture:
    """How a GGUF architecture maps to ours."""

    model_type: str
    class_name: str


_ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture("llama", "LlamaForCausalLM"),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM"),
}


def convert(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write config.json, safetensors and tokenizer files of `source` into the empty `folder`.

    Raises ModelError for an architecture, tensor or tokenizer that is not understood, and OSError for a
    folder that cannot be written.
    """
    _convert(source, folder, dtype, None)


def convert_packed(source: Path, folder: Path, scheme: str) -> None:
    """As `convert`, with the weights quantised and packed (see `packing`) in place of safetensors.

    Raises NotPackable for a model of sizes that don't allow it.
    """
    _convert(source, folder, torch.float32, scheme)


def _convert(source: Path, folder: Path, dtype: torch.dtype, scheme: str | None) -> None:
    file = GgufFile(source)
    if file.fields.get("split.count", 1) > 1:
        raise ModelError(f"{source.name} is one part of a split GGUF file; merge the parts first")
    try:
        config = build_config(file, dtype)
        if scheme is not None:
            check_packable(parse_decoder_config(config))
        _write_json(folder / "config.json", config)
        _write_tokenizer(file.fields, folder)
        weights = GgufWeights(file, config)
        if scheme is None:
            _write_weights(weights, folder, dtype)
        else:
            write_packed(parse_decoder_config(config), weights, scheme, folder)
    except KeyError as missing:
        raise ModelError(f"{source.name} lacks {missing}") from missing


def build_config(file: GgufFile, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a GGUF file."""
    name = file.fields.get("general.architecture")
    architecture = _ARCHITECTURES.get(str(name))
    if architecture is None:
        raise ModelError(
            f"GGUF architecture {name!r} is not one of {', '.join(_ARCHITECTURES)}; "
            "use the model's safetensors folder"
        )

    def field(key: str, default: Any = None) -> Any:
        return file.fields.get(f"{name}.{key}", default)

    if field("expert_count", 0):
        raise ModelError("a GGUF mixture of experts is not read; use the model's safetensors folder")
    num_heads = _required(field("attention.head_count"), "attention.head_count")
    hidden_size = _required(field("embedding_length"), "embedding_length")
    head_dim = int(field("attention.key_length") or hidden_size // num_heads)
    rotated = int(field("rope.dimension_count") or head_dim)
    if rotated != head_dim or int(field("attention.value_length") or head_dim) != head_dim:
        raise ModelError(f"GGUF heads of {head_dim} with {rotated} rotated dimensions are not read")
    special = {f"{kind}_token_id": token_id for kind, token_id in special_ids(file.fields).items()}
    special.pop("unk_token_id", None)
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": _required(field("feed_forward_length"), "feed_forward_length"),
        "num_hidden_layers": _required(field("block_count"), "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(field("attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _required(field("context_length"), "context_length"),
        "rms_norm_eps": _shortest(field("attention.layer_norm_rms_epsilon", 1e-6)),
        "rope_parameters": _rope_parameters(file, str(name), head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": architecture.model_type != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        **special,
    }


def _rope_parameters(file: GgufFile, name: str, head_dim: int) -> dict[str, Any]:
    theta = _shortest(file.fields.get(f"{name}.rope.freq_base", 10_000.0))
    if ROPE_FACTORS in file.tensors:
        return _llama3_parameters(file.read(ROPE_FACTORS), theta, head_dim)
    kind = file.fields.get(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise ModelError(f"GGUF rope scaling {kind!r} is not read; use the model's safetensors folder")
    parameters = {
        "rope_type": kind,
        "rope_theta": theta,
        "factor": _shortest(file.fields[f"{name}.rope.scaling.factor"]),
    }
    if kind == "linear":
        return parameters
    trained = file.fields.get(f"{name}.rope.scaling.original_context_length")
    if trained:
        parameters["original_max_position_embeddings"] = trained
    for key in ("beta_fast", "beta_slow"):
        if (value := file.fields.get(f"{name}.rope.scaling.yarn_{key}")) is not None:
            parameters[key] = _shortest(value)
    return parameters


def _llama3_parameters(factors: torch.Tensor, theta: float, head_dim: int) -> dict[str, Any]:
    """GGUF keeps what each frequency is divided by, transformers the rule behind it. Llama 3.1 and 3.2 differ
    in one number of the rule, the largest factor; that the others are theirs is checked."""
    parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": _shortest(float(factors.max())),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain, scaled = (
        torch.tensor(parse_rope({"rope_parameters": rule}, head_dim, 8192, theta).frequencies)
        for rule in ({"rope_theta": theta}, parameters)
    )
    if factors.shape != plain.shape or not torch.allclose(plain / factors, scaled, rtol=1e-5, atol=0):
        raise ModelError("the GGUF file's rope frequencies are not Llama 3's; use the safetensors folder")
    return parameters


def _write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    (folder / "tokenizer.json").write_text(build_tokenizer(fields).to_str(pretty=True), encoding="utf-8")
    tokens = fields["tokenizer.ggml.tokens"]
    special = {f"{kind}_token": tokens[token_id] for kind, token_id in special_ids(fields).items()}
    templates = _chat_templates(fields)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": adds_bos(fields),
            "clean_up_tokenization_spaces": False,
            **special,
            **({"chat_template": templates} if templates else {}),
        },
    )
    ends = end_ids(fields)
    _write_json(folder / "generation_config.json", {"eos_token_id": ends} if ends else {})


def _chat_templates(fields: Mapping[str, Any]) -> str | list[dict[str, str]]:
    """As tokenizer_config.json has them: one text, or a list where there are named ones; empty for none. In a
    GGUF file these stand under keys that end in their names, as llama.cpp writes and reads them."""
    default = fields.get(_CHAT_TEMPLATE)
    prefix = f"{_CHAT_TEMPLATE}."
    named = {key.removeprefix(prefix): text for key, text in fields.items() if key.startswith(prefix)}
    found = ({"default": default} if default else {}) | named
    if not named:
        return default or ""
    return [{"name": name, "template": text} for name, text in found.items() if isinstance(text, str)]


def _write_weights(weights: GgufWeights, folder: Path, dtype: torch.dtype) -> None:
    """Shards of about SHARD_BYTES, so that a large model never has to be in memory whole."""
    shard: dict[str, torch.Tensor] = {}
    size, num_shards = 0, 0
    index: dict[str, str] = {}

    def flush() -> None:
        nonlocal shard, size, num_shards
        num_shards += 1
        shard_name = f"model-{num_shards:05d}.safetensors"
        try:
            save_file(shard, folder / shard_name, metadata={"format": "pt"})
        except SafetensorError as error:  # its own, also for a disk that is full
            raise OSError(f"{shard_name}: {error}") from error
        index.update(dict.fromkeys(shard, shard_name))
        shard, size = {}, 0

    for name in weights.names:
        tensor = weights.take(name).to(dtype).contiguous()
        shard[name] = tensor
        size += tensor.nbytes
        if size >= SHARD_BYTES:
            flush()
    if shard:
        flush()
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})


def _required(value: Any, key: str) -> int:
    if not isinstance(value, int):
        raise ModelError(f"the GGUF file has no single {key}")
    return value


def _shortest(value: float) -> float:
    """GGUF stores float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
