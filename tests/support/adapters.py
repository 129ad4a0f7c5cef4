"""Adapters with random weights, as PEFT makes and saves them, and its own answer with one of them alone."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from pageturner.kernels.low_rank import LowRankOps
from pageturner.service.model.adapters import AdapterShapes, AdapterWeights, read_adapter
from pageturner.service.model.decoder_config import DecoderConfig

ALL_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def save_adapter(
    model: PreTrainedModel, folder: Path, seed: int, *, scale: float = 0.2, **options: Any
) -> Path:
    """An adapter of this model whose factors are a function of the seed; the model is left as it is."""
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": ALL_MODULES}
    with _as_peft_is():
        adapted = get_peft_model(
            copy.deepcopy(model), LoraConfig(task_type="CAUSAL_LM", **(settings | options))
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    adapted.save_pretrained(str(folder))
    return folder


def adapted_by_peft(model: PreTrainedModel, folder: Path | None) -> Any:
    """The model with this adapter, or none."""
    if folder is None:
        return model
    with _as_peft_is():
        adapted: Any = PeftModel.from_pretrained(copy.deepcopy(model), str(folder))
    torch.nn.Module.eval(adapted)
    return adapted


@torch.no_grad()
def logits_by_peft(model: PreTrainedModel, folder: Path | None, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab_size] of the model with this adapter, or none."""
    found: torch.Tensor = adapted_by_peft(model, folder)(torch.tensor([tokens])).logits[0]
    return found


@contextmanager
def _as_peft_is() -> Iterator[None]:
    """It asks a model for what this `transformers` calls by another name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def read(folder: Path, config: DecoderConfig, ops: LowRankOps, max_rank: int = 64) -> AdapterWeights:
    return read_adapter(folder, AdapterShapes(config, max_rank, 1 << 30), ops)
