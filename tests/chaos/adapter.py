"""A LoRA adapter with random weights, as PEFT saves one, by the sizes of a model alone."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 4
EMBEDDED = {"hidden_size": 576, "num_hidden_layers": 30}
"""Sizes of the embedded model, which is no folder to read them from."""


def save_adapter(model: Path | str, folder: Path) -> Path:
    """Of every layer's query projection, whose output is as wide as its input. Returns the folder."""
    sizes = json.loads((model / "config.json").read_text()) if isinstance(model, Path) else EMBEDDED
    width, generator = sizes["hidden_size"], torch.Generator().manual_seed(0)
    factors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{name}.weight": (
            torch.randn(shape, generator=generator) * 0.03
        )
        for layer in range(sizes["num_hidden_layers"])
        for name, shape in (("A", (RANK, width)), ("B", (width, RANK)))
    }
    folder.mkdir()
    save_file(factors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
