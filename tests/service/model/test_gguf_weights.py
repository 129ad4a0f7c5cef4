"""A GGUF file's groups, kept as they are: the same values as dequantised, rows in the model's order."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from pageturner.service.errors import ModelError
from pageturner.service.model.gguf import GgufFile
from pageturner.service.model.gguf_blocks import BLOCK_KINDS
from pageturner.service.model.gguf_weights import GgufWeights

HEADS, KV_HEADS, OUT, IN = 4, 2, 32, 512
CONFIG = {"model_type": "llama", "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
GROUPED = [gguf.GGMLQuantizationType[kind.name] for kind in BLOCK_KINDS.values() if kind.split is not None]
NARROW = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4}
_NUM_HALVES = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}


def blocks(kind: gguf.GGMLQuantizationType, rows: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Random bytes, but scales and minima that are finite."""
    rng = np.random.default_rng(kind.value)
    values, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows * IN // values, size), dtype=np.uint8)
    count = _NUM_HALVES.get(kind.name, 1)
    halves = rng.normal(0, 0.01, (len(raw), count)).astype(np.float16).view(np.uint8)
    place = slice(-2, None) if kind.name == "Q6_K" else slice(0, 2 * count)
    raw[:, place] = halves
    return raw.reshape(rows, -1)


def write(path: Path, kind: gguf.GGMLQuantizationType) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, rows in (("blk.0.attn_q", OUT), ("blk.0.attn_k", OUT // 2), ("blk.0.ffn_down", OUT)):
        writer.add_tensor(f"{name}.weight", blocks(kind, rows), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", GROUPED, ids=lambda kind: kind.name)
def test_groups_have_the_values_of_the_file(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    weights = GgufWeights(GgufFile(write(tmp_path / "a.gguf", kind)), CONFIG)
    for name, rows in (
        ("self_attn.q_proj", OUT),
        ("self_attn.k_proj", OUT // 2),
        ("mlp.down_proj", OUT),
    ):
        name = f"model.layers.0.{name}.weight"
        groups = weights.take_groups(name, (rows, IN))
        assert groups is not None
        assert groups.bits == NARROW.get(kind.name, 8)
        assert groups.group == (16 if kind.name == "Q6_K" else 32)
        assert torch.equal(groups.dequantised(), weights.take(name, (rows, IN)))
    assert not list(weights.left())


def test_rows_of_q_and_k_are_in_the_order_of_halves(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q4_1
    file = GgufFile(write(tmp_path / "a.gguf", kind))
    found = GgufWeights(file, CONFIG).take_groups("model.layers.0.self_attn.q_proj.weight", (OUT, IN))
    assert found is not None
    head_dim = OUT // HEADS
    for row in range(OUT):
        head, place = divmod(row, head_dim)
        half, index = divmod(place, head_dim // 2)
        in_file = file.read("blk.0.attn_q.weight")[head * head_dim + 2 * index + half]
        assert torch.equal(found.dequantised()[row], in_file)
    other = GgufWeights(file, CONFIG | {"model_type": "qwen3"})
    kept = other.take_groups("model.layers.0.self_attn.q_proj.weight", (OUT, IN))
    assert kept is not None
    assert torch.equal(kept.dequantised(), file.read("blk.0.attn_q.weight"))


def test_a_large_scale_of_q4_0_keeps_its_offset(tmp_path: Path) -> None:
    """8 times a half may be beyond halves."""
    kind = gguf.GGMLQuantizationType.Q4_0
    path = write(tmp_path / "a.gguf", kind)
    raw = bytearray(path.read_bytes())
    start = len(raw) - OUT * IN // 32 * 18
    raw[start : start + 2] = np.float16(60000).tobytes()
    path.write_bytes(raw)
    weights = GgufWeights(GgufFile(path), CONFIG)
    name = "model.layers.0.mlp.down_proj.weight"
    groups = weights.take_groups(name, (OUT, IN))
    assert groups is not None
    assert groups.scales.dtype is torch.float32
    assert torch.equal(groups.dequantised(), weights.take(name, (OUT, IN)))


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_refused_by_name(value: float, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", gguf.GGMLQuantizationType.Q8_0)
    raw = bytearray(path.read_bytes())
    start = len(raw) - OUT * IN // 32 * 34
    raw[start : start + 2] = np.float16(value).tobytes()
    path.write_bytes(raw)
    weights = GgufWeights(GgufFile(path), CONFIG)
    with pytest.raises(ModelError, match=r"blk.0.ffn_down.weight is damaged"):
        weights.take_groups("model.layers.0.mlp.down_proj.weight", (OUT, IN))


def test_a_missing_tensor_and_another_shape_are_refused(tmp_path: Path) -> None:
    weights = GgufWeights(GgufFile(write(tmp_path / "a.gguf", gguf.GGMLQuantizationType.Q8_0)), CONFIG)
    with pytest.raises(ModelError, match=r"lacks model.norm.weight"):
        weights.take("model.norm.weight", (OUT,))
    with pytest.raises(ModelError, match=r"has shape \(32, 512\)"):
        weights.take_groups("model.layers.0.mlp.down_proj.weight", (OUT, 64))
