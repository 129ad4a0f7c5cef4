"""Weights as products read them: the numbers of a `GroupedWeight` in tiles of TILE outputs.

A tile is one run of bytes,

    codes    [groups][chunks of 4 inputs][TILE outputs][4 inputs]
    scales   [groups][TILE outputs]
    offsets  [groups][TILE outputs]      where the weight has them

each of the three begun at a multiple of ALIGNMENT bytes. With codes of 4 bits a byte holds two: chunk c in
the low half, chunk c + group / 8 in the high half, so that 64 bytes give two whole chunks. Outputs are
filled up to a multiple of TILE with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from pageturner.kernels.checks import check_shape
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.grouped import GroupedWeight

TILE = 16
"""Outputs side by side: one vector register of float32."""
ALIGNMENT = 64
LAYOUT_VERSION = 1
"""Raised whenever the same weight would be packed into other bytes: files of them are kept."""


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """How the bytes of a packed weight are laid out: what is needed to read them again from a file."""

    out_features: int
    in_features: int
    bits: int
    group: int
    scale_dtype: torch.dtype
    has_offsets: bool

    @property
    def tiles(self) -> int:
        return -(-self.out_features // TILE)

    @property
    def groups(self) -> int:
        """Of one output."""
        return self.in_features // self.group

    @property
    def codes_bytes(self) -> int:
        """Of one tile."""
        return TILE * self.in_features * self.bits // 8

    @property
    def scales_bytes(self) -> int:
        """Of one tile, and of its offsets, filled up to ALIGNMENT."""
        return -(-TILE * self.groups * self.scale_dtype.itemsize // ALIGNMENT) * ALIGNMENT

    @property
    def tile_bytes(self) -> int:
        return self.codes_bytes + self.scales_bytes * (2 if self.has_offsets else 1)

    @property
    def num_bytes(self) -> int:
        """Of the whole weight."""
        return self.tiles * self.tile_bytes


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight as products read it, on the CPU.

    Raises KernelArgumentError for a buffer that is not of the layout's size, or a bias of another shape.
    """

    layout: PackedLayout
    buffer: torch.Tensor
    """uint8 [layout.num_bytes], contiguous; faster at a multiple of ALIGNMENT. It may be a mapped file."""
    bias: torch.Tensor | None = None
    """float32 [out], added last."""

    def __post_init__(self) -> None:
        check_shape("buffer", self.buffer, (self.layout.num_bytes,), torch.uint8)
        if not self.buffer.is_contiguous():
            raise KernelArgumentError("buffer", f"strided {self.buffer.stride()}", "contiguous bytes")
        if self.bias is not None:
            check_shape("bias", self.bias, (self.layout.out_features,), torch.float32)


def pack(weight: GroupedWeight, bias: torch.Tensor | None = None) -> PackedWeight:
    """The weight in the order of a product. bias: [out], or None."""
    layout = PackedLayout(
        weight.out_features,
        weight.in_features,
        weight.bits,
        weight.group,
        weight.scales.dtype,
        weight.offsets is not None,
    )
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    codes, scales, offsets = _sections(layout, buffer)
    rows = weight.codes.view(torch.uint8)
    if weight.bits == 4:
        halves = rows.reshape(len(rows), layout.groups, 2, -1)
        rows = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    _put(codes, rows.contiguous().view(torch.int32))  # an int32 is one output's chunk
    _put(scales, weight.scales)
    if offsets is not None and weight.offsets is not None:
        _put(offsets, weight.offsets)
    return PackedWeight(layout, buffer, None if bias is None else bias.float().contiguous())


def unpack(packed: PackedWeight) -> GroupedWeight:
    """What was packed, without its bias."""
    layout = packed.layout
    codes, scales, offsets = _sections(layout, packed.buffer)
    rows = _get(codes, layout).view(torch.uint8)
    if layout.bits == 4:
        both = rows.reshape(len(rows), layout.groups, -1)
        rows = torch.stack((both & 15, both >> 4), dim=2).flatten(1)
    return GroupedWeight(
        rows if layout.bits == 4 else rows.view(torch.int8),
        _get(scales, layout),
        None if offsets is None else _get(offsets, layout),
        layout.group,
    )


def rows_of(packed: PackedWeight, outputs: torch.Tensor) -> torch.Tensor:
    """The weights of some outputs, int64 [T], as float32 [T, in]: an embedding's rows."""
    layout = packed.layout
    tiles, lanes = outputs // TILE, outputs % TILE
    codes, scales, offsets = (
        None if section is None else section[tiles, :, lanes] for section in _sections(layout, packed.buffer)
    )
    assert codes is not None
    assert scales is not None
    groups = codes.view(torch.uint8).view(len(outputs), layout.groups, -1)
    groups = torch.cat((groups & 15, groups >> 4), dim=2) if layout.bits == 4 else groups.view(torch.int8)
    weights = scales.float()[..., None] * groups.float()
    return (weights if offsets is None else weights + offsets.float()[..., None]).flatten(1)


def _zeros(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def take_outputs(
    packed: PackedWeight, outputs: Sequence[range], allocate: Callable[[int], torch.Tensor] = _zeros
) -> PackedWeight:
    """The weight of some outputs alone, side by side, with their bias: the same numbers in other memory.

    allocate: uint8 zeros, so many.
    """
    chosen = torch.cat([torch.arange(part.start, part.stop) for part in outputs])
    layout = replace(packed.layout, out_features=len(chosen))
    buffer = allocate(layout.num_bytes)
    if all(part.start % TILE == 0 and len(part) % TILE == 0 for part in outputs):
        tiles = packed.buffer.view(packed.layout.tiles, -1)
        runs = [tiles[part.start // TILE : part.stop // TILE] for part in outputs]
        torch.cat(runs, out=buffer.view(layout.tiles, -1))
    else:
        pairs = zip(_sections(packed.layout, packed.buffer), _sections(layout, buffer), strict=True)
        for source, section in pairs:
            if source is not None and section is not None:
                _put(section, source[chosen // TILE, :, chosen % TILE])
    return PackedWeight(layout, buffer, None if packed.bias is None else packed.bias[chosen])


def _sections(
    layout: PackedLayout, buffer: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Views: codes int32 [tiles, chunks, TILE], scales and offsets [tiles, groups, TILE]."""
    tiles = buffer.view(layout.tiles, layout.tile_bytes)
    used = TILE * layout.groups * layout.scale_dtype.itemsize

    def values(begin: int) -> torch.Tensor:
        section = tiles[:, begin : begin + used].view(layout.scale_dtype)
        return section.view(layout.tiles, layout.groups, TILE)

    codes = tiles[:, : layout.codes_bytes].view(torch.int32).view(layout.tiles, -1, TILE)
    scales = values(layout.codes_bytes)
    return codes, scales, values(layout.codes_bytes + layout.scales_bytes) if layout.has_offsets else None


def _put(section: torch.Tensor, rows: torch.Tensor) -> None:
    """rows [out, n] -> section [tiles, n, TILE]; outputs that fill up the last tile stay as they are."""
    whole = rows.shape[0] // TILE
    section[:whole] = rows[: whole * TILE].reshape(whole, TILE, rows.shape[1]).transpose(1, 2)
    if rows.shape[0] % TILE:
        section[whole, :, : rows.shape[0] % TILE] = rows[whole * TILE :].T


def _get(section: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """section [tiles, n, TILE] -> rows [out, n]."""
    return section.transpose(1, 2).flatten(0, 1)[: layout.out_features].contiguous()


def check_rows(name: str, rows: torch.Tensor, layout: PackedLayout) -> None:
    """float32 [T, in] for a weight of that layout. Raises KernelArgumentError, as the next."""
    check_shape(name, rows, (None, layout.in_features), torch.float32)


def check_mlp(gate_up: PackedLayout, down: PackedLayout) -> None:
    """gate_up [2 * I, *] feeds down [*, I]."""
    if gate_up.out_features != 2 * down.in_features:
        raise KernelArgumentError(
            "gate_up",
            f"of {gate_up.out_features} outputs",
            f"2 * {down.in_features}: down has so many inputs",
        )
