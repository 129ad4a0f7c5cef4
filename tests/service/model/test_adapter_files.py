"""PEFT folders: what is read of them, and every setting or tensor that is not served, refused by its name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.ops import cpu_library
from support.random_models import tiny_config

from pageturner.kernels.cpu.low_rank import CpuLowRankOps
from pageturner.service.bench.lora import write_adapter
from pageturner.service.errors import AdapterError
from pageturner.service.model.adapter_config import parse_adapter_config
from pageturner.service.model.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterShapes,
    AdapterWeights,
    read_adapter,
)
from pageturner.service.model.decoder_config import parse_decoder_config

CONFIG = parse_decoder_config(tiny_config("llama").to_dict() | {"architectures": ["LlamaForCausalLM"]})
NAME = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
QUERY = "model.layers.0.self_attn.q_proj"


def read(folder: Path, max_rank: int = 8, max_bytes: int = 1 << 20) -> AdapterWeights:
    return read_adapter(folder, AdapterShapes(CONFIG, max_rank, max_bytes), CpuLowRankOps(cpu_library()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(CONFIG, tmp_path / "adapter", 4, 0)


def configured(folder: Path, **changes: object) -> Path:
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


REFUSED: Mapping[str, Any] = {
    "peft_type": "IA3",
    "use_dora": True,
    "modules_to_save": ["embed_tokens"],
    "bias": "lora_only",
    "lora_bias": True,
    "fan_in_fan_out": True,
    "layer_replication": [[0, 1], [0, 2]],
    "trainable_token_indices": [1],
    "megatron_config": {"x": 1},
    "target_parameters": ["experts"],
    "use_qalora": True,
    "alora_invocation_tokens": [5],
    "a_setting_of_tomorrow": 3,
    "init_lora_weights": "pissa_niter_4",
    "target_modules": ["q_proj", "lm_head"],
    "exclude_modules": ".*k_proj",
    "layers_to_transform": [7],
    "lora_alpha": "16",
    "use_rslora": "yes",
    "alpha_pattern": {"(a+)+b": 3},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_is_not_served_is_named(name: str, folder: Path) -> None:
    with pytest.raises(AdapterError, match=f"^{name}"):
        read(configured(folder, **{name: REFUSED[name]}))


def test_settings_that_change_nothing_are_taken(folder: Path) -> None:
    digest = read(folder).digest
    inert = {"lora_dropout": 0.1, "task_type": "CAUSAL_LM", "use_dora": False, "modules_to_save": None}
    assert read(configured(folder, **inert, init_lora_weights="gaussian")).digest == digest
    assert read(configured(folder, target_modules="all-linear")).digest == digest
    assert read(configured(folder, lora_alpha=5)).digest != digest


DOWN = "base_model.model.model.layers.1.mlp.down_proj"
WRONG: Mapping[str, tuple[str, torch.Tensor | None, str]] = {
    "missing": (NAME, None, "lacks its lora_A"),
    "not finite": (
        NAME,
        torch.full((4, 48), float("nan")),
        "down_proj.lora_A.weight holds an infinity or NaN",
    ),
    "of other inputs": (NAME, torch.zeros(4, 7), r"down_proj.lora_A is \[4, 7\]"),
    "no matrix": (NAME, torch.zeros(4), "not a matrix of floats"),
    "integers": (NAME, torch.zeros(4, 48, dtype=torch.int8), "not a matrix of floats"),
    "too high a rank": (NAME, torch.zeros(9, 48), "of rank 9; 1 to 8 are served"),
    "of the head": ("base_model.model.lm_head.lora_A.weight", torch.zeros(4, 32), "lm_head"),
    "of no layer": (NAME.replace(".1.", ".2."), torch.zeros(4, 48), r"layers\.2"),
    "of DoRA": (f"{DOWN}.lora_magnitude_vector", torch.zeros(4), "lora_magnitude_vector"),
    "there twice": (NAME.replace("lora_A.", "lora_A.default."), torch.zeros(4, 48), "is there twice"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_tensor_that_does_not_fit_is_named(case: str, folder: Path) -> None:
    name, tensor, message = WRONG[case]
    tensors = load_file(folder / WEIGHTS_FILE)
    tensors.pop(name, None)
    save_file(tensors if tensor is None else tensors | {name: tensor}, folder / WEIGHTS_FILE)
    with pytest.raises(AdapterError, match=message):
        read(folder)


def test_a_module_that_the_settings_name_must_be_there(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    save_file({name: each for name, each in tensors.items() if DOWN not in name}, folder / WEIGHTS_FILE)
    with pytest.raises(AdapterError, match=r"lacks model.layers.1.mlp.down_proj"):
        read(folder)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]
    with pytest.raises(AdapterError, match=r"has model.layers.0.mlp.down_proj"):
        read(configured(folder, target_modules=targets))
    assert read(configured(folder, target_modules=r".*\.(\w+_proj)")).rank == 4


def test_files_that_are_none_are_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=CONFIG_FILE):
        read(tmp_path)
    with pytest.raises(AdapterError, match=r"1\d* bytes, more than 1000"):
        read(folder, max_bytes=1000)
    weights = folder / WEIGHTS_FILE
    content = weights.read_bytes()
    weights.write_bytes(content[:-10])
    with pytest.raises(AdapterError, match="cannot be read"):
        read(folder)
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(content)
    with pytest.raises(AdapterError, match="may hold code"):
        read(folder)
    os.mkfifo(weights)  # a pipe, which would never end
    with pytest.raises(AdapterError, match="there is no file"):
        read(folder)
    for text in ("[]", "{", '{"a": ' * 100_000):
        (folder / CONFIG_FILE).write_text(text)
        with pytest.raises(AdapterError, match=CONFIG_FILE):
            read(folder)


def test_digest_rank_modules_and_bytes_are_told(folder: Path, tmp_path: Path) -> None:
    found = read(folder)
    again = read(write_adapter(CONFIG, tmp_path / "again", 4, 0))
    other = read(write_adapter(CONFIG, tmp_path / "other", 4, 1))
    assert found.digest == again.digest != other.digest
    assert found.rank == 4
    assert found.modules == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert found.num_bytes == sum(tensor.numel() * 4 for tensor in load_file(folder / WEIGHTS_FILE).values())


def test_the_factor_is_alpha_over_the_rank_or_its_root() -> None:
    plain = {"peft_type": "LORA", "lora_alpha": 6, "target_modules": ["q_proj"]}
    assert parse_adapter_config(plain, 2).factor(QUERY, 4) == 1.5
    assert parse_adapter_config(plain | {"use_rslora": True}, 2).factor(QUERY, 4) == 3.0
    pattern = {"alpha_pattern": {r"layers\.0.*q_proj": 8, "q_proj": 1}}
    settings = parse_adapter_config(plain | pattern, 2)
    assert settings.factor(QUERY, 4) == 2.0
    assert settings.factor(QUERY.replace("0", "1"), 4) == 0.25
