"""Packed weights on disk: one file of bytes that is read whole, and an index that says where what lies.

Written once (see `conversion_cache`, which also checks the bytes); a start reads it and packs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.packed import ALIGNMENT, PackedLayout, PackedWeight
from pageturner.service.errors import ModelError
from pageturner.service.model.pages import own_pages

WEIGHTS, INDEX = "weights.bin", "weights.json"
_BIAS = "bias"


class PackedWriter:
    """Writes the two files into a folder, tensor by tensor; a context manager. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = (folder / WEIGHTS).open("wb")
        self._entries: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        self._file.close()
        if kind is None:
            (self._folder / INDEX).write_text(json.dumps(self._entries))

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor of plain numbers."""
        offset = self._write(tensor)
        self._entries[name] = {"offset": offset, "dtype": _name(tensor.dtype), "shape": list(tensor.shape)}

    def add_packed(self, name: str, weight: PackedWeight) -> None:
        """A packed weight, with its bias."""
        layout = weight.layout
        self._entries[name] = {
            "offset": self._write(weight.buffer),
            "out_features": layout.out_features,
            "in_features": layout.in_features,
            "bits": layout.bits,
            "group": layout.group,
            "scale_dtype": _name(layout.scale_dtype),
            "has_offsets": layout.has_offsets,
        }
        if weight.bias is not None:
            self.add(f"{name}.{_BIAS}", weight.bias)

    def _write(self, tensor: torch.Tensor) -> int:
        """Where it begins, at a multiple of ALIGNMENT."""
        self._file.write(bytes(-self._file.tell() % ALIGNMENT))
        offset = self._file.tell()
        self._file.write(tensor.contiguous().view(torch.uint8).numpy().data)
        return offset


class PackedSource(Protocol):
    """Where packed weights come from, by the names of `packing`."""

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """A tensor of plain numbers. Raises ModelError if it is missing or of another shape."""
        ...

    def take_packed(
        self, name: str, out_features: int, in_features: int, *, bias: bool = False
    ) -> PackedWeight:
        """A packed weight. Raises ModelError if it is missing or of another shape."""
        ...


class PackedFile:
    """A `PackedSource`: the files of a folder, read. Remembers nothing of what was taken.

    mapped: nothing is read before it is touched, for one who copies parts. Raises ModelError where the files
    can't be read.
    """

    def __init__(self, folder: Path, *, mapped: bool = False) -> None:
        self._path = folder / WEIGHTS
        try:
            self._entries: Mapping[str, Mapping[str, Any]] = json.loads((folder / INDEX).read_bytes())
            self._bytes = _map(self._path) if mapped else _read(self._path)
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            raise ModelError(f"{folder} cannot be read: {error}") from error

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """A tensor of plain numbers. Raises ModelError if it is missing or of another shape."""
        entry = self._entry(name)
        if tuple(entry.get("shape", ())) != tuple(shape):
            raise ModelError(f"{self._path}: {name} has shape {entry.get('shape')}, not {tuple(shape)}")
        dtype: torch.dtype = getattr(torch, entry["dtype"])
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self._bytes[entry["offset"] : entry["offset"] + num_bytes].view(dtype).view(*shape)

    def take_packed(
        self, name: str, out_features: int, in_features: int, *, bias: bool = False
    ) -> PackedWeight:
        """A packed weight. Raises ModelError if it is missing or of another shape."""
        entry = self._entry(name)
        if (entry.get("out_features"), entry.get("in_features")) != (out_features, in_features):
            raise ModelError(f"{self._path}: {name} is not {out_features} x {in_features}")
        layout = PackedLayout(
            out_features,
            in_features,
            entry["bits"],
            entry["group"],
            getattr(torch, entry["scale_dtype"]),
            entry["has_offsets"],
        )
        buffer = self._bytes[entry["offset"] : entry["offset"] + layout.num_bytes]
        try:
            return PackedWeight(
                layout, buffer, self.take(f"{name}.{_BIAS}", (out_features,)) if bias else None
            )
        except KernelArgumentError as error:
            raise ModelError(f"{self._path}: {name}: {error}") from error

    @property
    def num_bytes(self) -> int:
        """Of all weights."""
        return len(self._bytes)

    def _entry(self, name: str) -> Mapping[str, Any]:
        if name not in self._entries:
            raise ModelError(f"{self._path} lacks {name}")
        return self._entries[name]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _map(path: Path) -> torch.Tensor:
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def _read(path: Path) -> torch.Tensor:
    """All bytes, in huge pages: a step reads every weight once, and a map of the file a third slower."""
    size = path.stat().st_size
    content = own_pages((size,), torch.uint8, huge=True)
    with path.open("rb") as file:
        count = file.readinto(content.numpy().data)
    if count < size:
        raise OSError(f"{path} ended after {count} of {size} bytes")
    return content
