"""Keys and values as codes of one byte with a scale: the definition of both kinds.

A token's key of one kv head, or its value, is head_dim codes and one scale in bfloat16:

    dtype of the pool   a code is                     scale
    int8                an integer, -127 to 127       max|x| / 127
    float8_e4m3fn       a float of 8 bits, to 448     max|x| / 448 or up to twice that, whichever errs least

(Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv:2209.05433), and x is about scale * code.
A token has scales of its own: writing it touches no other token's codes, and its codes depend on its own
numbers alone, so that they have the same bits when they are computed again after a preemption. bfloat16 has
float32's exponents, so that no scale overflows. Codes are found from the scale as it is kept: its rounding
makes steps coarser by 0.4 % at most and adds no error of its own.

Why a choice. Integers lie as close everywhere, so that the smallest scale that cuts nothing off is the best.
Floats lie apart by a share of themselves that doubles where their octaves begin: what counts is where in
those a row's large numbers fall, and a scale moves them all. One octave of scales meets every case, since
twice a scale errs as much; at the small end, 17 octaves below, a row has a bit to lose.

    candidates   scale 0 is max|x| / 448 in bfloat16; scale k has k / SCALES of an octave, which is 2^7, added
                 to its bits. So none is rounded, and none is so small that codes would be cut off
    error        of a number: (x / scale - code) * scale / scale 0, in 32nds of a step of scale 0; squared
                 and cut to a whole number below 2^20, so that sums of up to 2,047 numbers are integers of 31
                 bits: lanes, warps and vectors have no order to agree on. The first of the least sums wins
"""

from __future__ import annotations

import math

import torch

MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest code of each kind."""

SCALES = 8
"""Candidates for the scale of a row of floats."""

_OCTAVE = 1 << 7  # in a bfloat16's bits
_ERROR_UNITS = 32.0  # of the smallest scale


def encode(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [..., head_dim] -> (codes of `dtype` [..., head_dim], scales bfloat16 [...]).

    A code is x / scale, by the scale's inverse, rounded to the nearest, ties to even. Every operation is in
    float32. A row whose max|x| / MOST is, in bfloat16, below float32's smallest normal number counts as
    zeros. A row that holds an infinity or NaN has zeros for codes and the scale NaN, so that whatever reads
    it becomes NaN.

    The scale is below max|x| / MOST by 2^-8 of itself at most: codes round to MOST and never above.
    """
    wide = rows.float()
    finite = wide.isfinite().all(dim=-1)
    scales = (wide.abs().amax(dim=-1) / MOST[dtype]).bfloat16()
    scales = scales.masked_fill(scales < torch.finfo(torch.float32).tiny, 0)
    coded = finite & (scales > 0)
    numbers = torch.where(coded[..., None], wide, 0)
    if dtype is torch.float8_e4m3fn:
        scales = torch.where(coded, _least_error(numbers, scales), scales)
    inverse = torch.where(coded, 1 / scales.float(), 0)
    steps = numbers * inverse[..., None]
    codes = (steps.round() if dtype is torch.int8 else steps).to(dtype)
    return codes, scales.masked_fill(~finite, math.nan)


def _least_error(rows: torch.Tensor, smallest: torch.Tensor) -> torch.Tensor:
    """rows float32 [..., head_dim], smallest bfloat16 [...] -> of each row's candidates the best.

    Errors are what codes bring about: to() rounds as the codes of `encode` are. Rows of zeros get any scale.
    """
    raised = torch.arange(0, _OCTAVE, _OCTAVE // SCALES, dtype=torch.int16, device=smallest.device)
    candidates = (smallest.view(torch.int16)[..., None] + raised).view(torch.bfloat16)
    scales = candidates.float()
    steps = rows[..., None, :] * (1 / scales)[..., None]
    units = scales * (1 / smallest.float())[..., None] * _ERROR_UNITS
    errors = (steps - steps.to(torch.float8_e4m3fn).float()) * units[..., None]
    sums = (errors * errors).to(torch.int32).sum(dim=-1)
    return candidates.gather(-1, sums.argmin(dim=-1, keepdim=True)).squeeze(-1)


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes [..., head_dim], scales [...] -> float32 [..., head_dim]: each product, rounded once."""
    return codes.float() * scales.float()[..., None]
