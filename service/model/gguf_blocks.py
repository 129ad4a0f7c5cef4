"""The block formats of GGUF, taken apart: raw bytes -> codes, scales and offsets by group.

Layouts: ggml's `ggml-common.h`. Dequantised, they have the bits that the `gguf` package gives (the same
operations in the same order, in float32).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Groups:
    """Values of many groups: w = scales * (codes - zero) + offsets.

    codes: uint8, or int8 where zero is 0, [groups, values of one]. scales, offsets: float16 or float32
    [groups, 1], as the file has them or, where it has them in parts, multiplied out exactly in float32.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    zero: int = 0

    def dequantise(self) -> torch.Tensor:
        """float32 [groups, values of one]."""
        values = self.scales.float() * (self.codes.to(torch.float32) - self.zero)
        return values if self.offsets is None else values + self.offsets.float()


@dataclass(frozen=True, slots=True)
class BlockKind:
    """Values come in blocks of `values` in `size` bytes. Exactly one of:

    read: uint8 [blocks, size] -> float32, of plain numbers. split: uint8 [blocks, size] -> groups, in which
    codes have `bits` bits.
    """

    name: str
    values: int
    size: int
    read: Callable[[torch.Tensor], torch.Tensor] | None = None
    split: Callable[[torch.Tensor], Groups] | None = None
    bits: int = 0

    def dequantise(self, raw: torch.Tensor) -> torch.Tensor:
        """uint8 [blocks, size] -> float32, as many as there are."""
        if self.read is not None:
            return self.read(raw)
        assert self.split is not None, f"{self.name} has neither reader nor groups"
        return self.split(raw).dequantise()


def _half(raw: torch.Tensor) -> torch.Tensor:
    """Two bytes a block -> float16 [blocks, 1]."""
    return raw.contiguous().view(torch.float16)


def _nibbles(raw: torch.Tensor, group: int) -> torch.Tensor:
    """Each group of bytes holds its low halves first, then its high halves: uint8 [blocks, 2 * bytes]."""
    grouped = raw.reshape(raw.shape[0], -1, 1, group)
    return torch.cat((grouped & 15, grouped >> 4), dim=2).reshape(raw.shape[0], -1)


def _fifth_bits(raw: torch.Tensor) -> torch.Tensor:
    """Four bytes -> their 32 bits, lowest first, each worth 16."""
    bits = torch.arange(8, dtype=torch.uint8)
    return ((raw[:, :, None] >> bits) & 1).reshape(raw.shape[0], -1) << 4


def _q4_0(raw: torch.Tensor) -> Groups:
    return Groups(_nibbles(raw[:, 2:], 16), _half(raw[:, :2]), zero=8)


def _q4_1(raw: torch.Tensor) -> Groups:
    return Groups(_nibbles(raw[:, 4:], 16), _half(raw[:, :2]), _half(raw[:, 2:4]))


def _q5_0(raw: torch.Tensor) -> Groups:
    return Groups(_nibbles(raw[:, 6:], 16) | _fifth_bits(raw[:, 2:6]), _half(raw[:, :2]), zero=16)


def _q5_1(raw: torch.Tensor) -> Groups:
    codes = _nibbles(raw[:, 8:], 16) | _fifth_bits(raw[:, 4:8])
    return Groups(codes, _half(raw[:, :2]), _half(raw[:, 2:4]))


def _q8_0(raw: torch.Tensor) -> Groups:
    return Groups(raw[:, 2:].contiguous().view(torch.int8), _half(raw[:, :2]))


def _scales_and_minima(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Twelve bytes -> eight 6-bit scales and eight 6-bit minima."""
    first, second, third = raw[:, 0:4], raw[:, 4:8], raw[:, 8:12]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=1)
    return scales.to(torch.float32), minima.to(torch.float32)


def _k_blocks(raw: torch.Tensor, codes: torch.Tensor) -> Groups:
    scales, minima = _scales_and_minima(raw[:, 4:16])
    factors = _half(raw[:, :2]).float() * scales
    offsets = -(_half(raw[:, 2:4]).float() * minima)
    return Groups(codes.reshape(-1, 32), factors.reshape(-1, 1), offsets.reshape(-1, 1))


def _q4_k(raw: torch.Tensor) -> Groups:
    return _k_blocks(raw, _nibbles(raw[:, 16:], 32))


def _q5_k(raw: torch.Tensor) -> Groups:
    bits = torch.arange(8, dtype=torch.uint8)[None, :, None]
    fifth = ((raw[:, None, 16:48] >> bits) & 1).reshape(raw.shape[0], -1) << 4
    return _k_blocks(raw, _nibbles(raw[:, 48:], 32) | fifth)


def _q6_k(raw: torch.Tensor) -> Groups:
    low = _nibbles(raw[:, :128], 64)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[None, None, :, None]
    high = ((raw[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(raw.shape[0], -1) << 4
    scales = raw[:, 192:208].contiguous().view(torch.int8).to(torch.float32)
    factors = _half(raw[:, 208:210]).float() * scales
    return Groups((low | high).reshape(-1, 16), factors.reshape(-1, 1), zero=32)


BLOCK_KINDS: Mapping[int, BlockKind] = {
    0: BlockKind("F32", 1, 4, read=lambda raw: raw.view(torch.float32).clone()),
    1: BlockKind("F16", 1, 2, read=lambda raw: _half(raw).float()),
    2: BlockKind("Q4_0", 32, 18, split=_q4_0, bits=4),
    3: BlockKind("Q4_1", 32, 20, split=_q4_1, bits=4),
    6: BlockKind("Q5_0", 32, 22, split=_q5_0, bits=5),
    7: BlockKind("Q5_1", 32, 24, split=_q5_1, bits=5),
    8: BlockKind("Q8_0", 32, 34, split=_q8_0, bits=8),
    12: BlockKind("Q4_K", 256, 144, split=_q4_k, bits=4),
    13: BlockKind("Q5_K", 256, 176, split=_q5_k, bits=5),
    14: BlockKind("Q6_K", 256, 210, split=_q6_k, bits=6),
    30: BlockKind("BF16", 1, 2, read=lambda raw: raw.view(torch.bfloat16).to(torch.float32)),
}
"""By GGUF's number of the type."""
