"""Frequencies bit for bit those of transformers, in both layouts of config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pageturner.service.errors import ConfigError, ModelError
from pageturner.service.model.rope import parse_rope, scaled_config

_SIZES = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "max_position_embeddings": 4096}
_SCALED: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn_untruncated": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "truncate": False,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.3,
    },
}


def reference_table(config: LlamaConfig, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    rope = LlamaRotaryEmbedding(config)
    cos, sin = rope(torch.zeros(1, dtype=torch.float32), torch.arange(num_positions)[None])
    return cos[0], sin[0]


@pytest.mark.parametrize("layout", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", list(_SCALED))
def test_tables_have_the_bits_of_transformers(name: str, layout: str, tmp_path: Path) -> None:
    parameters = dict(_SCALED[name])
    written: dict[str, Any] = {"model_type": "llama", **_SIZES}
    if layout == "rope_parameters":
        written["rope_parameters"] = {**parameters, "rope_theta": 50_000.0}
    else:
        # As configs were written for years: the theta outside, the kind under `type`.
        parameters["type"] = parameters.pop("rope_type")
        written |= {"rope_theta": 50_000.0, "rope_scaling": None if name == "default" else parameters}
    (tmp_path / "config.json").write_text(json.dumps(written))
    cos, sin = parse_rope(written, 64, 4096, 10_000.0).table(4096)
    expected_cos, expected_sin = reference_table(AutoConfig.from_pretrained(tmp_path), 4096)
    assert torch.equal(cos, expected_cos)
    assert torch.equal(sin, expected_sin)


def test_theta_falls_back_to_the_family() -> None:
    rope = parse_rope({}, 8, 32, 2_000_000.0)
    assert rope.frequencies[1] == pytest.approx(2_000_000.0 ** (-2 / 8))
    assert rope.max_position == 32


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
        {"rope_type": "proportional"},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": -2.0},
        {"rope_type": "llama3", "factor": float("nan")},
        {"rope_type": "default", "partial_rotary_factor": 0.25},
        {"rope_type": "default", "mrope_section": [1, 1, 2]},
        {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}},
    ],
)
def test_what_one_table_cannot_hold_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        parse_rope({"rope_parameters": parameters}, 8, 32, 10_000.0)


@pytest.mark.fault("19")
@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 32_768),
        ({"rope_type": "yarn", "factor": 4.0}, 32_768),
        ({"type": "linear", "factor": 2.0}, 16_384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 8192),
        ({"type": "dynamic", "factor": 2.0}, 8192),
        ({"rope_type": "default"}, 8192),
    ],
)
def test_a_stretched_rope_offers_factor_times_the_trained_length(
    scaling: dict[str, Any], positions: int
) -> None:
    rope = parse_rope({"rope_scaling": scaling, "rope_theta": 1e5}, 64, 8192, 1e4)
    assert rope.max_position == positions
    cos, _ = rope.table(positions)
    assert cos.shape == (positions, 64)


@pytest.mark.parametrize(
    "factors", [{"short_factor": [1.0] * 3}, {"short_factor": 1.0}, {}, {"long_factor": [1.0] * 4}]
)
def test_longrope_needs_a_factor_for_each_frequency(factors: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="short_factor: 4 factors are needed"):
        parse_rope({"rope_parameters": {"rope_type": "longrope"} | factors}, 8, 32, 10_000.0)


def test_a_scaling_of_an_unknown_kind_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^model\.rope_scaling: rope_type 'elastic' is none of"):
        scaled_config({}, {"rope_type": "elastic", "factor": 2.0}, None)
    with pytest.raises(ModelError, match="factor"):
        parse_rope(scaled_config({}, {"rope_type": "yarn", "factor": -1}, None), 8, 32, 10_000.0)


def test_a_scaling_keeps_the_theta_of_the_model() -> None:
    for config in ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}):
        scaled = scaled_config(config, {"rope_type": "linear", "factor": 2.0}, None)
        plain = parse_rope(config, 8, 32, 10_000.0)
        stretched = parse_rope(scaled, 8, 32, 10_000.0)
        assert [2 * each for each in stretched.frequencies] == pytest.approx(list(plain.frequencies))
        assert stretched.max_position == 64
