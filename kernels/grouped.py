"""Weights quantised in groups along their inputs, as files hold them.

    w[o, i] = scales[o, i // group] * codes[o, i] + offsets[o, i // group]

The kinds that GGUF has (Q4_0, Q4_1, Q5_*, Q8_0, the K-quants) all map to this exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pageturner.kernels.checks import check_shape, describe, either
from pageturner.kernels.errors import KernelArgumentError

GROUPS = (32, 16)
"""Inputs that share a scale."""
RANK_GROUPS = (32, 16, 8)
"""The same in the second factor of a low-rank part, whose inputs are a few ranks."""
SCALE_DTYPES = (torch.float16, torch.float32)
_BITS = {torch.uint8: 4, torch.int8: 8}


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeight:
    """One weight [out, in], quantised in groups.

    Raises KernelArgumentError for shapes and dtypes that do not belong together, for a 4-bit code above 15
    and for a scale or an offset that is not finite.
    """

    codes: torch.Tensor
    """uint8 [out, in] of 0 to 15 (4 bits), or int8 [out, in]."""
    scales: torch.Tensor
    """float16 or float32 [out, in / group]."""
    offsets: torch.Tensor | None
    """As scales, or None: no offset."""
    group: int
    """Of GROUPS, or of RANK_GROUPS."""

    def __post_init__(self) -> None:
        check_shape("codes", self.codes, (None, None))
        if self.codes.dtype not in _BITS:
            raise KernelArgumentError("codes", describe(self.codes), either(tuple(_BITS)))
        if self.group not in RANK_GROUPS or not self.codes.numel() or self.codes.shape[1] % self.group:
            raise KernelArgumentError(
                "codes",
                f"{describe(self.codes)} in groups of {self.group}",
                f"whole groups, of {RANK_GROUPS}",
            )
        if self.bits == 4 and int(self.codes.max()) > 15:
            raise KernelArgumentError("codes", f"up to {int(self.codes.max())}", "at most 15 in 4 bits")
        if self.scales.dtype not in SCALE_DTYPES:
            raise KernelArgumentError("scales", describe(self.scales), either(SCALE_DTYPES))
        shape = (self.out_features, self.in_features // self.group)
        for name, values in (("scales", self.scales), ("offsets", self.offsets)):
            if values is not None:
                check_shape(name, values, shape, self.scales.dtype)
                if not bool(values.isfinite().all()):
                    raise KernelArgumentError(name, "not finite everywhere", "finite values")

    @property
    def bits(self) -> int:
        """Of a code: 4 or 8."""
        return _BITS[self.codes.dtype]

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]

    def dequantised(self) -> torch.Tensor:
        """float32 [out, in], each element rounded once for the product and once for the sum."""
        codes = self.codes.float().reshape(len(self.codes), -1, self.group)
        weights = self.scales.float()[..., None] * codes
        if self.offsets is not None:
            weights = weights + self.offsets.float()[..., None]
        return weights.flatten(1)


def concatenate(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """All outputs of the first, then of the next, for products that share an input.

    Where kinds differ, the narrower are widened without loss: to 8 bits, groups of 16, float32 scales and
    offsets of zero. Raises KernelArgumentError where they have different inputs.
    """
    in_features = {weight.in_features for weight in weights}
    if len(in_features) != 1:
        raise KernelArgumentError("weights", f"of {sorted(in_features)} inputs", "weights of the same inputs")
    group = min(weight.group for weight in weights)
    bits = max(weight.bits for weight in weights)
    wide = any(weight.scales.dtype is torch.float32 for weight in weights)
    has_offsets = any(weight.offsets is not None for weight in weights)

    def widened(values: torch.Tensor, weight: GroupedWeight) -> torch.Tensor:
        return values.to(torch.float32 if wide else values.dtype).repeat_interleave(weight.group // group, 1)

    return GroupedWeight(
        codes=torch.cat([weight.codes.to(torch.int8 if bits == 8 else torch.uint8) for weight in weights]),
        scales=torch.cat([widened(weight.scales, weight) for weight in weights]),
        offsets=torch.cat(
            [
                widened(torch.zeros_like(weight.scales) if weight.offsets is None else weight.offsets, weight)
                for weight in weights
            ]
        )
        if has_offsets
        else None,
        group=group,
    )
