"""Bugs in how the CPU's operations read and write codes, and the check that catches each."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pageturner.kernels.interface import AttentionSpec, PagedOps
from pageturner.kernels.layout import CODE_DTYPES
from support.coded import check_coded_attention, check_coded_unseen, check_coded_writes
from support.kernel_checks import layout_for
from support.planting import ExpressionBug


def read_codes(ops: PagedOps) -> None:
    for dtype in CODE_DTYPES:
        check_coded_attention(ops, layout_for(ops, 2, 64, 16, dtype), torch.float32, AttentionSpec(scale=0.3))


def write_codes(ops: PagedOps) -> None:
    for dtype in CODE_DTYPES:
        check_coded_writes(ops, layout_for(ops, 2, 64, 16, dtype), torch.bfloat16)


def unseen_codes(ops: PagedOps) -> None:
    for dtype in CODE_DTYPES:
        check_coded_unseen(ops, dtype)


CODE_CHECKS = (read_codes, write_codes, unseen_codes)

CODE_BUGS: dict[str, tuple[ExpressionBug, Callable[[PagedOps], None]]] = {
    name: (ExpressionBug(file, right, wrong), check)
    for name, file, right, wrong, check in (
        (
            "a key's scale is left out",
            "attention.h",
            "scales(step.key_scales, i)",
            "splat(1)",
            read_codes,
        ),
        (
            "a value has its key's scale",
            "attention.h",
            "scales(step.value_scales, i)",
            "scales(step.key_scales, i)",
            read_codes,
        ),
        (
            "the scale of a hidden key is multiplied by zero",
            "attention.h",
            "hidden(i) ? splat(0) : scores[i]",
            "scores[i]",
            unseen_codes,
        ),
        (
            "scales are read from the block's first token on",
            "attention.h",
            "scales_of(keys, args.block_size, args.head_dim) + offset",
            "scales_of(keys, args.block_size, args.head_dim) + (offset & 0) + 1",
            read_codes,
        ),
        (
            "a float of 8 bits is half as large",
            "simd.h",
            "(bits & 0x7f) << 20",
            "((bits & 0x7f) - 8) << 20",
            read_codes,
        ),
        (
            "small floats of 8 bits are made as large ones are",
            "simd.h",
            "magnitude < 121u << 23",
            "magnitude < 118u << 23",
            write_codes,
        ),
        (
            "floats of 8 bits lose their sign",
            "simd.h",
            "bits >> 24 & 0x80",
            "bits & 0",
            write_codes,
        ),
        (
            "a scale whose inverse is infinite counts",
            "codes.h",
            "as_float(scale) >= FLT_MIN",
            "as_float(scale) > 0",
            write_codes,
        ),
        (
            "what is no number is written as zeros",
            "codes.h",
            "largest == INFINITY ? 0x7fc0 : 0",
            "0",
            write_codes,
        ),
        (
            "of scales as good the last is taken",
            "codes.h",
            "sum < least",
            "sum <= least",
            write_codes,
        ),
        (
            "the largest of the scales is not tried",
            "codes.h",
            "k < SCALES",
            "k < SCALES - 1",
            write_codes,
        ),
        (
            "errors are counted in steps of their own scale",
            "codes.h",
            "as_float(candidate) * of_smallest",
            "1.0f",
            write_codes,
        ),
        (
            "codes are made from the scale before it was rounded",
            "codes.h",
            "1.0f / as_float(scale)",
            "MOST_CODE<Code> / largest",
            write_codes,
        ),
    )
}
