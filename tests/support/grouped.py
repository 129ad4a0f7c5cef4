"""Weights in groups, of every kind that a product takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pageturner.kernels.grouped import GroupedWeight


@dataclass(frozen=True)
class Kind:
    """One combination of code width, group, scale dtype and offsets."""

    bits: int
    group: int
    scale_dtype: torch.dtype
    has_offsets: bool


KINDS = {
    "Q4_1": Kind(4, 32, torch.float16, True),
    "Q8_0": Kind(8, 32, torch.float16, False),
    "Q4_K": Kind(4, 32, torch.float32, True),
    "Q5_1": Kind(8, 32, torch.float16, True),
    "Q6_K": Kind(8, 16, torch.float32, False),
    "Q2_K": Kind(4, 16, torch.float32, True),
    "int4": Kind(4, 32, torch.float16, False),
}


def grouped_weight(kind: Kind, out_features: int, in_features: int, seed: int = 0) -> GroupedWeight:
    """Codes over their whole range, scales of both signs, a few groups of zeros."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (0, 16) if kind.bits == 4 else (-128, 128)
    codes = torch.randint(low, high, (out_features, in_features), generator=generator)
    shape = (out_features, in_features // kind.group)
    scales = torch.randn(shape, generator=generator) * 0.01
    scales[torch.rand(shape, generator=generator) < 0.05] = 0
    offsets = torch.randn(shape, generator=generator) * 0.05
    return GroupedWeight(
        codes.to(torch.uint8 if kind.bits == 4 else torch.int8),
        scales.to(kind.scale_dtype),
        offsets.to(kind.scale_dtype) if kind.has_offsets else None,
        kind.group,
    )
