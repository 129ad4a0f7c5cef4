"""GGUF files: header fields and tensors, read through one mmap, dequantised or group by group.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The block formats of `gguf_blocks` are read
here; the rarer ones by the `gguf` package, as float32.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pageturner.service.errors import ModelError
from pageturner.service.model.gguf_blocks import BLOCK_KINDS, Groups

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
        kind = BLOCK_KINDS.get(tensor.type_id)
        if kind is None:
            return self._read_rare(tensor, count)
        raw = self._bytes(tensor, count, kind.values, kind.size)
        return kind.dequantise(raw.view(-1, kind.size)).reshape(tensor.shape)

    def read_groups(self, name: str) -> tuple[Groups, int] | None:
        """The tensor's groups in order, and the bits of a code; None for a kind that has none here."""
        tensor = self.tensors[name]
        kind = BLOCK_KINDS.get(tensor.type_id)
        if kind is None or kind.split is None:
            return None
        raw = self._bytes(tensor, math.prod(tensor.shape), kind.values, kind.size)
        return kind.split(raw.view(-1, kind.size)), kind.bits

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
