"""Float weights in groups of integers with a scale each: for files that hold plain numbers.

int8 is symmetric by the largest value of a group. int4 has a scale and an offset, the range of a group cut by
the share, of a few, that leaves the least squared error (as in llama.cpp's and HQQ's searches).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from pageturner.kernels.grouped import GroupedWeight
from pageturner.service.errors import ModelError

_Quantise = Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]

GROUP = 32
_RANGE_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
_ROWS_AT_ONCE = 4096
"""Bounds the float32 copies that a large matrix needs meanwhile."""


def quantise_int8(weight: torch.Tensor) -> GroupedWeight:
    """[out, in] in groups of GROUP: w is about scale * code, codes -127 to 127."""
    return _quantise(weight, _int8, 127)


def quantise_int4(weight: torch.Tensor) -> GroupedWeight:
    """[out, in] in groups of GROUP: w is about scale * code + offset, codes 0 to 15."""
    return _quantise(weight, _int4, 15)


SCHEMES: Mapping[str, Callable[[torch.Tensor], GroupedWeight]] = {
    "int8": quantise_int8,
    "int4": quantise_int4,
}


def check_finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor. Raises ModelError, with the name, if a value of it is infinite or no number."""
    if not bool(tensor.isfinite().all()):
        raise ModelError(f"{name} holds values that are infinite or no numbers; it can't be quantised")
    return tensor


def _quantise(weight: torch.Tensor, quantise: _Quantise, levels: int) -> GroupedWeight:
    dtype = _scale_dtype(weight, levels)
    codes, scales, offsets = zip(*(quantise(piece, dtype) for piece in _pieces(weight)), strict=True)
    return GroupedWeight(
        torch.cat(codes),
        torch.cat(scales),
        None if offsets[0] is None else torch.cat(offsets),
        GROUP,
    )


def _pieces(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """float32 [rows, groups, GROUP], some rows at a time."""
    for rows in torch.split(weight, _ROWS_AT_ONCE):
        yield rows.float().reshape(len(rows), -1, GROUP)


def _scale_dtype(weight: torch.Tensor, levels: int) -> torch.dtype:
    """float16, unless the scales are so small or large that it would round them by more than 2^-9."""
    tops = torch.cat([piece.abs().amax(dim=-1) for piece in _pieces(weight)]) / levels
    fits = (tops == 0) | ((tops >= 2.0**-16) & (tops < torch.finfo(torch.float16).max / levels))
    return torch.float16 if bool(fits.all()) else torch.float32


def _int8(groups: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, None]:
    scales = (groups.abs().amax(dim=-1) / 127).to(dtype)
    codes = _nearest(groups, scales).clamp(-127, 127).to(torch.int8)
    return codes.flatten(1), scales, None


def _int4(groups: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)
    best: tuple[torch.Tensor, ...] | None = None
    for share in _RANGE_SHARES:
        scales = ((high - low) * (share / 15)).to(dtype)
        offsets = ((high + low - (high - low) * share) / 2).to(dtype)
        codes = _nearest(groups - offsets[..., None], scales).clamp(0, 15)
        errors = (scales[..., None] * codes + offsets[..., None] - groups).square().sum(dim=-1)
        found = (errors, scales, offsets, codes)
        if best is None:
            best = found
        else:
            better = errors < best[0]
            best = tuple(
                torch.where(better if new.dim() == better.dim() else better[..., None], new, old)
                for new, old in zip(found, best, strict=True)
            )
    assert best is not None, "there is at least one share"
    _, scales, offsets, codes = best
    return codes.to(torch.uint8).flatten(1), scales, offsets


def _nearest(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The nearest multiple of its scale, as a multiple; 0 in a group of scale 0."""
    wide = scales.float()[..., None]
    return torch.where(wide > 0, groups / wide, 0).round()
