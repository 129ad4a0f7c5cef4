"""A whole model folder that can be chatted with: random weights, a real tokenizer, a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support.random_models import save, tiny_model
from support.tiny_tokenizers import byte_level_bpe

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def save_chat_model(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """A random model of 4,096 positions with a tokenizer of its own; returns the folder."""
    tokenizer = byte_level_bpe()
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 4096, **changes}
    _, tiny = tiny_model(family, seed=0, **sizes)
    save(tiny, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def save_plain_adapter(model: Path, folder: Path, seed: int, rank: int = 4) -> Path:
    """An adapter of every module of the model in a folder, random and strong; returns its own folder."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    sizes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (outputs, inputs) in sizes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            for letter, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                tensors[f"{name}.lora_{letter}.weight"] = 0.3 * torch.randn(shape, generator=generator)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
