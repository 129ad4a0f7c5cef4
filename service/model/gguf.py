"""GGUF files: header fields and tensors, read through one mmap and dequantised by torch.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The quantisations below are exact
copies in arithmetic of the `gguf` package's (same operations, same order, float32), which reads the
rarer ones in their place.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pageturner.service.errors import ModelError

_MAGIC = b"GGUF"
_SCALARS: Mapping[int, str] = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Values come in blocks of `values` in `size` bytes. dequantise: uint8 [blocks, size] -> float32."""

    name: str
    values: int
    size: int
    dequantise: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies. shape: outermost dimension first, as torch has it."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


class GgufFile:
    """One open GGUF file. `fields` are its key-value pairs, `tensors` its directory.

    Raises ModelError for a file that is not GGUF version 2 or 3, or is cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise ModelError(f"{path} is not a GGUF file")
            # Copy on write: torch wants writable memory, and the file must not change.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, OverflowError, RecursionError) as error:
            raise ModelError(f"{path} is damaged: {error}") from error

    def _read_header(self) -> None:
        cursor = _Cursor(self._map, 4)
        version = cursor.scalar("<I")
        if version not in (2, 3):
            raise ModelError(f"{self.path} has GGUF version {version}; 2 and 3 are read")
        num_tensors, num_fields = cursor.scalar("<Q"), cursor.scalar("<Q")
        self.fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key = cursor.string()
            self.fields[key] = cursor.value(cursor.scalar("<I"))
        tensors = []
        for _ in range(num_tensors):
            name, num_dims = cursor.string(), cursor.scalar("<I")
            shape = tuple(cursor.scalar("<Q") for _ in range(num_dims))
            tensors.append(GgufTensor(name, shape[::-1], cursor.scalar("<I"), cursor.scalar("<Q")))
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self.path} is damaged: alignment {alignment!r}")
        self._data_start = -(-cursor.offset // alignment) * alignment
        self.tensors: Mapping[str, GgufTensor] = {tensor.name: tensor for tensor in tensors}

    def read(self, name: str) -> torch.Tensor:
        """The tensor in float32, freshly allocated."""
        tensor = self.tensors[name]
        count = math.prod(tensor.shape)
        kind = QUANTISATIONS.get(tensor.type_id)
        if kind is None or kind.dequantise is None:
            return self._read_rare(tensor, count)
        raw = self._bytes(tensor, count, kind.values, kind.size)
        return kind.dequantise(raw.view(-1, kind.size)).reshape(tensor.shape)

    def _bytes(self, tensor: GgufTensor, count: int, values: int, size: int) -> torch.Tensor:
        """The raw bytes of a tensor of `count` values, in blocks of `values` in `size` bytes."""
        if not tensor.shape or not count or tensor.shape[-1] % values:
            raise ModelError(f"{self.path}: {tensor.name} has shape {tensor.shape} in blocks of {values}")
        start, num_bytes = self._data_start + tensor.offset, count // values * size
        if start + num_bytes > len(self._map):
            raise ModelError(f"{self.path} is cut short: {tensor.name} lies beyond its end")
        return torch.frombuffer(self._map, dtype=torch.uint8, count=num_bytes, offset=start)

    def _read_rare(self, tensor: GgufTensor, count: int) -> torch.Tensor:
        """A quantisation that is not done here, through the `gguf` package."""
        import gguf

        try:
            kind = gguf.GGMLQuantizationType(tensor.type_id)
            values, size = gguf.GGML_QUANT_SIZES[kind]
            raw = self._bytes(tensor, count, values, size).numpy()
            rows = raw.reshape(*tensor.shape[:-1], tensor.shape[-1] // values * size)
            data = gguf.quants.dequantize(rows, kind)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise ModelError(f"{self.path}: {tensor.name} has type {tensor.type_id}: {error}") from error
        return torch.from_numpy(data.astype("float32")).reshape(tensor.shape)


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, buffer: mmap.mmap, offset: int) -> None:
        self._buffer = buffer
        self.offset = offset

    def scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self._buffer, self.offset)
        self.offset += struct.calcsize(layout)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        raw = self._buffer[self.offset : self.offset + length]
        if len(raw) != length:
            raise struct.error("a string runs past the end of the file")
        self.offset += length
        return raw.decode("utf-8")

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            item_type, length = self.scalar("<I"), self.scalar("<Q")
            if item_type in _SCALARS:
                layout = f"<{length}{_SCALARS[item_type][1]}"
                values = struct.unpack_from(layout, self._buffer, self.offset)
                self.offset += struct.calcsize(layout)
                return list(values)
            return [self.value(item_type) for _ in range(length)]
        if type_id not in _SCALARS:
            raise struct.error(f"unknown value type {type_id}")
        return self.scalar(_SCALARS[type_id])


def _half(raw: torch.Tensor) -> torch.Tensor:
    """Two bytes a block -> float32 [blocks, 1]."""
    return raw.contiguous().view(torch.float16).to(torch.float32)


def _nibbles(raw: torch.Tensor, group: int) -> torch.Tensor:
    """Each group of bytes holds its low halves first, then its high halves: uint8 [blocks, 2 * bytes]."""
    grouped = raw.reshape(raw.shape[0], -1, 1, group)
    return torch.cat((grouped & 15, grouped >> 4), dim=2).reshape(raw.shape[0], -1)


def _fifth_bits(raw: torch.Tensor) -> torch.Tensor:
    """Four bytes -> their 32 bits, lowest first, each worth 16."""
    bits = torch.arange(8, dtype=torch.uint8)
    return ((raw[:, :, None] >> bits) & 1).reshape(raw.shape[0], -1) << 4


def _q4_0(raw: torch.Tensor) -> torch.Tensor:
    return _half(raw[:, :2]) * (_nibbles(raw[:, 2:], 16).to(torch.float32) - 8)


def _q4_1(raw: torch.Tensor) -> torch.Tensor:
    return _half(raw[:, :2]) * _nibbles(raw[:, 4:], 16).to(torch.float32) + _half(raw[:, 2:4])


def _q5_0(raw: torch.Tensor) -> torch.Tensor:
    values = _nibbles(raw[:, 6:], 16) | _fifth_bits(raw[:, 2:6])
    return _half(raw[:, :2]) * (values.to(torch.float32) - 16)


def _q5_1(raw: torch.Tensor) -> torch.Tensor:
    values = _nibbles(raw[:, 8:], 16) | _fifth_bits(raw[:, 4:8])
    return _half(raw[:, :2]) * values.to(torch.float32) + _half(raw[:, 2:4])


def _q8_0(raw: torch.Tensor) -> torch.Tensor:
    return _half(raw[:, :2]) * raw[:, 2:].contiguous().view(torch.int8).to(torch.float32)


def _scales_and_minima(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Twelve bytes -> eight 6-bit scales and eight 6-bit minima."""
    first, second, third = raw[:, 0:4], raw[:, 4:8], raw[:, 8:12]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=1)
    return scales.to(torch.float32), minima.to(torch.float32)


def _k_blocks(raw: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(raw[:, 4:16])
    factor = (_half(raw[:, :2]) * scales)[:, :, None]
    offset = (_half(raw[:, 2:4]) * minima)[:, :, None]
    return factor * values.reshape(raw.shape[0], 8, 32).to(torch.float32) - offset


def _q4_k(raw: torch.Tensor) -> torch.Tensor:
    return _k_blocks(raw, _nibbles(raw[:, 16:], 32))


def _q5_k(raw: torch.Tensor) -> torch.Tensor:
    bits = torch.arange(8, dtype=torch.uint8)[None, :, None]
    fifth = ((raw[:, None, 16:48] >> bits) & 1).reshape(raw.shape[0], -1) << 4
    return _k_blocks(raw, _nibbles(raw[:, 48:], 32) | fifth)


def _q6_k(raw: torch.Tensor) -> torch.Tensor:
    low = _nibbles(raw[:, :128], 64)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[None, None, :, None]
    high = ((raw[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(raw.shape[0], -1) << 4
    values = ((low | high).to(torch.float32) - 32).reshape(raw.shape[0], 16, 16)
    scales = raw[:, 192:208].contiguous().view(torch.int8).to(torch.float32)
    return (_half(raw[:, 208:210]) * scales)[:, :, None] * values


QUANTISATIONS: Mapping[int, Quantisation] = {
    0: Quantisation("F32", 1, 4, lambda raw: raw.view(torch.float32).clone()),
    1: Quantisation("F16", 1, 2, _half),
    2: Quantisation("Q4_0", 32, 18, _q4_0),
    3: Quantisation("Q4_1", 32, 20, _q4_1),
    6: Quantisation("Q5_0", 32, 22, _q5_0),
    7: Quantisation("Q5_1", 32, 24, _q5_1),
    8: Quantisation("Q8_0", 32, 34, _q8_0),
    12: Quantisation("Q4_K", 256, 144, _q4_k),
    13: Quantisation("Q5_K", 256, 176, _q5_k),
    14: Quantisation("Q6_K", 256, 210, _q6_k),
    30: Quantisation("BF16", 1, 2, lambda raw: raw.view(torch.bfloat16).to(torch.float32)),
}
