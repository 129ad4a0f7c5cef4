"""GGUF read bit for bit as the `gguf` package reads it, and refused where it is damaged."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from pageturner.service.errors import ModelError
from pageturner.service.model.gguf import GgufFile
from pageturner.service.model.gguf_blocks import BLOCK_KINDS

QUANTISED = [
    kind for kind in gguf.GGMLQuantizationType if kind.name in {q.name for q in BLOCK_KINDS.values()}
]
RARE = [gguf.GGMLQuantizationType.Q2_K, gguf.GGMLQuantizationType.IQ4_XS, gguf.GGMLQuantizationType.TQ1_0]


def write(path: Path, kind: gguf.GGMLQuantizationType, raw: npt.NDArray[np.uint8]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("a.list", [1, 2, 3])
    writer.add_array("a.names", ["x", "日本", ""])
    writer.add_float64("a.double", 0.1)
    writer.add_int64("a.negative", -5)
    writer.add_bool("a.flag", True)
    if kind is gguf.GGMLQuantizationType.F32:
        writer.add_tensor("weight", raw.view(np.float32))
    elif kind is gguf.GGMLQuantizationType.F16:
        writer.add_tensor("weight", raw.view(np.float16))
    else:
        writer.add_tensor("weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_bytes(kind: gguf.GGMLQuantizationType, rows: int, columns: int) -> npt.NDArray[np.uint8]:
    values, size = gguf.GGML_QUANT_SIZES[kind]
    return np.random.default_rng(3).integers(0, 256, (rows, columns // values * size), dtype=np.uint8)


def test_every_kind_of_our_own_is_known_to_the_package() -> None:
    assert {kind.name for kind in QUANTISED} == {q.name for q in BLOCK_KINDS.values()}
    for type_id, quantisation in BLOCK_KINDS.items():
        kind = gguf.GGMLQuantizationType(type_id)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (
            quantisation.name,
            (quantisation.values, quantisation.size),
        )


# Random scales include halves that are NaN or infinite, and overflow.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", [*QUANTISED, *RARE], ids=lambda kind: kind.name)
def test_values_have_the_bits_of_the_gguf_package(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    raw = random_bytes(kind, 6, 1024)
    found = GgufFile(write(tmp_path / "a.gguf", kind, raw)).read("weight")
    expected = gguf.quants.dequantize(raw, kind)
    assert found.dtype == torch.float32
    assert found.shape == (6, 1024)
    np.testing.assert_array_equal(found.numpy(), expected)


def test_fields_of_every_type(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.F32
    fields = GgufFile(write(tmp_path / "a.gguf", kind, random_bytes(kind, 1, 32))).fields
    assert fields["a.list"] == [1, 2, 3]
    assert fields["a.names"] == ["x", "日本", ""]
    assert fields["a.double"] == 0.1
    assert fields["a.negative"] == -5
    assert fields["a.flag"] is True
    assert fields["general.architecture"] == "llama"


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    whole = write(tmp_path / "whole.gguf", kind, random_bytes(kind, 8, 64)).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            GgufFile(cut).read("weight")


def test_a_damaged_byte_is_refused_or_read_but_never_a_crash(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q4_0
    path = write(tmp_path / "a.gguf", kind, random_bytes(kind, 2, 64))
    whole = path.read_bytes()
    num_refused = 0
    for offset in range(len(whole) - 2 * 2 * 18):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0xFF]) + whole[offset + 1 :])
        try:
            file = GgufFile(path)
            for name in file.tensors:
                file.read(name)
        except ModelError:
            num_refused += 1
    assert num_refused > 100


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [(0, b"GGML", "not a GGUF"), (4, b"\x01\0\0\0", "version 1"), (8, b"\xff" * 8, "damaged")],
)
def test_another_format_is_refused(offset: int, value: bytes, reason: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.F32
    path = write(tmp_path / "a.gguf", kind, random_bytes(kind, 1, 32))
    data = bytearray(path.read_bytes())
    data[offset : offset + len(value)] = value
    path.write_bytes(data)
    with pytest.raises(ModelError, match=reason):
        GgufFile(path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelError, match="not a GGUF"):
        GgufFile(tmp_path / "a.gguf")
