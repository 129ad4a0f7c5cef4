"""Keys and values as codes of one byte with a scale: the definition of both kinds.

A token's key of one kv head, or its value, is head_dim codes and one scale in bfloat16:

    dtype of the pool   a code is                     scale
    int8                an integer, -127 to 127       max|x| / 127
    float8_e4m3fn       a float of 8 bits, to 448     max|x| / 448

(Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv:2209.05433), and x is about scale * code.
A token has scales of its own: writing it touches no other token's codes, and its codes depend on its own
numbers alone, so that they have the same bits when they are computed again after a preemption. bfloat16 has
float32's exponents, so that no scale overflows. Codes are found from the scale as it is kept: its rounding
makes steps coarser by 0.4 % at most and adds no error of its own.
"""

from __future__ import annotations

import math

import torch

MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest code of each kind."""


def encode(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [..., head_dim] -> (codes of `dtype` [..., head_dim], scales bfloat16 [...]).

    The scale is max|x| / MOST, rounded to bfloat16; a code is x / scale, by the scale's inverse, rounded to
    the nearest, ties to even. Every operation is in float32. A scale below float32's smallest normal number
    counts as 0, and so do its row's codes. A row that holds an infinity or NaN has zeros for codes and the
    scale NaN, so that whatever reads it becomes NaN.

    The scale lies at most 2^-9 of itself below max|x| / MOST: codes round to MOST and never above.
    """
    wide = rows.float()
    finite = wide.isfinite().all(dim=-1)
    scales = (wide.abs().amax(dim=-1) / MOST[dtype]).bfloat16()
    scales = scales.masked_fill(scales < torch.finfo(torch.float32).tiny, 0)
    coded = finite & (scales > 0)
    inverse = torch.where(coded, 1 / scales.float(), 0)
    steps = torch.where(coded[..., None], wide, 0) * inverse[..., None]
    codes = (steps.round() if dtype is torch.int8 else steps).to(dtype)
    return codes, scales.masked_fill(~finite, math.nan)


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes [..., head_dim], scales [...] -> float32 [..., head_dim]: each product, rounded once."""
    return codes.float() * scales.float()[..., None]
