"""Which instances of the kernel templates are shipped, and how each is launched."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch

from pageturner.kernels.cuda import arguments, tiles
from pageturner.kernels.layout import CODE_DTYPES

DTYPES = (torch.bfloat16, torch.float16)
_C_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float",
    torch.int8: "int8_code",
    torch.float8_e4m3fn: "fp8_code",
}

ROW_THREADS = 128
"""Threads of a block of the kernels without shared-memory tiles: 4 warps, so that small grids spread."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled kernel.

    source: its file. expression: its name in C++, template arguments and all. threads: of a block, along
    x. shared_bytes: dynamic shared memory. arguments: the struct it takes, by value.
    """

    source: str
    expression: str
    threads: int
    shared_bytes: int
    arguments: type[ctypes.Structure]

    @property
    def kernel(self) -> str:
        """The template's name."""
        return self.expression.partition("<")[0]


@cache  # asked for at every launch
def paged_decode(dtype: torch.dtype, head_dim: int, *, bounded: bool, softcap: bool) -> Variant:
    """bounded: rows do not see all keys before them (a window or chunk). softcap: scores are capped."""
    shape = tiles.DECODE[head_dim]
    name = _instance("paged_decode", dtype, head_dim, shape.warps, shape.stages, bounded, softcap)
    return Variant("paged_decode.cu", name, shape.threads, shape.shared_bytes, arguments.AttentionArguments)


@cache
def decode_merge(dtype: torch.dtype, head_dim: int) -> Variant:
    """The kernel that adds up the parts of a context that was split."""
    return Variant(
        "paged_decode.cu",
        _instance("decode_merge", dtype, head_dim),
        head_dim // 2,  # two neighbouring dims a thread: one 32-bit store
        0,
        arguments.AttentionArguments,
    )


@cache
def paged_prefill(dtype: torch.dtype, head_dim: int, *, bounded: bool, softcap: bool) -> Variant:
    """bounded: with a window or chunk. softcap: with a soft cap."""
    shape = tiles.PREFILL[head_dim]
    name = _instance(
        "paged_prefill",
        dtype,
        head_dim,
        shape.warps,
        shape.row_tiles,
        shape.keys,
        shape.stages,
        bounded,
        softcap,
    )
    return Variant("paged_prefill.cu", name, shape.threads, shape.shared_bytes, arguments.AttentionArguments)


@cache
def coded_decode(
    dtype: torch.dtype, code: torch.dtype, head_dim: int, *, bounded: bool, softcap: bool
) -> Variant:
    """paged_decode over a pool of codes."""
    shape = tiles.CODED_DECODE[head_dim]
    name = _instance("coded_decode", dtype, head_dim, code, shape.warps, shape.stages, bounded, softcap)
    return Variant("coded_decode.cu", name, shape.threads, shape.shared_bytes, arguments.AttentionArguments)


@cache
def coded_prefill(
    dtype: torch.dtype, code: torch.dtype, head_dim: int, *, bounded: bool, softcap: bool
) -> Variant:
    """paged_prefill over a pool of codes."""
    shape = tiles.CODED_PREFILL[head_dim]
    name = _instance(
        "coded_prefill",
        dtype,
        head_dim,
        code,
        shape.warps,
        shape.row_tiles,
        shape.keys,
        shape.stages,
        bounded,
        softcap,
    )
    return Variant("coded_prefill.cu", name, shape.threads, shape.shared_bytes, arguments.AttentionArguments)


@cache
def coded_write_kv(dtype: torch.dtype, code: torch.dtype, table_dtype: torch.dtype | None) -> Variant:
    """The write of K and V as codes. table_dtype: of cos and sin; None: without rotation."""
    name = _instance("coded_write_kv", dtype, code, table_dtype or dtype, table_dtype is not None)
    return _rows("write_kv.cu", name, arguments.KvWriteArguments)


@cache
def write_kv(dtype: torch.dtype) -> Variant:
    """The write of K and V without rotation."""
    return _rows("write_kv.cu", _instance("write_kv", dtype), arguments.KvWriteArguments)


@cache
def rope_and_write_kv(dtype: torch.dtype, table_dtype: torch.dtype) -> Variant:
    """table_dtype: of cos and sin, float32 or the rows' own."""
    name = _instance("rope_and_write_kv", dtype, table_dtype)
    return _rows("write_kv.cu", name, arguments.KvWriteArguments)


@cache
def rms_norm(dtype: torch.dtype) -> Variant:
    """RMSNorm, with or without a residual."""
    return _rows("rms_norm.cu", _instance("rms_norm", dtype), arguments.RmsNormArguments)


@cache
def silu_and_mul(dtype: torch.dtype) -> Variant:
    """SwiGLU's activation."""
    return _rows("silu_and_mul.cu", _instance("silu_and_mul", dtype), arguments.SiluAndMulArguments)


@cache
def low_rank_shrink(dtype: torch.dtype) -> Variant:
    """The first of the two products of adapters."""
    return _rows("low_rank.cu", _instance("low_rank_shrink", dtype), arguments.LowRankArguments)


@cache
def low_rank_expand(dtype: torch.dtype) -> Variant:
    """The second, added to the outputs."""
    return _rows("low_rank.cu", _instance("low_rank_expand", dtype), arguments.LowRankArguments)


@cache
def copy_blocks() -> Variant:
    """Copies within a pool; bytes, so of any dtype."""
    return _rows("copy_blocks.cu", "copy_blocks", arguments.CopyBlocksArguments)


@cache
def gather_blocks() -> Variant:
    """Scattered blocks to one piece of memory."""
    return _rows("pack_blocks.cu", "gather_blocks", arguments.PackBlocksArguments)


@cache
def scatter_blocks() -> Variant:
    """One piece of memory to scattered blocks."""
    return _rows("pack_blocks.cu", "scatter_blocks", arguments.PackBlocksArguments)


def shipped() -> tuple[Variant, ...]:
    """What the budgets are checked for: all of them, but of those over codes the plain ones in bfloat16. The
    others are the same text, with the masks and caps that the kernels over plain numbers are checked with.
    """
    found = [copy_blocks(), gather_blocks(), scatter_blocks()]
    for dtype in DTYPES:
        found += [write_kv(dtype), rms_norm(dtype), silu_and_mul(dtype)]
        found += [low_rank_shrink(dtype), low_rank_expand(dtype)]
        found += [rope_and_write_kv(dtype, table_dtype) for table_dtype in (torch.float32, dtype)]
        for head_dim in tiles.HEAD_DIMS:
            found.append(decode_merge(dtype, head_dim))
            for bounded, softcap in product((False, True), repeat=2):
                found.append(paged_decode(dtype, head_dim, bounded=bounded, softcap=softcap))
                found.append(paged_prefill(dtype, head_dim, bounded=bounded, softcap=softcap))
    bf16 = torch.bfloat16
    for code in CODE_DTYPES:
        found += [coded_write_kv(bf16, code, table_dtype) for table_dtype in (None, torch.float32, bf16)]
        for head_dim in tiles.HEAD_DIMS:
            found.append(coded_decode(bf16, code, head_dim, bounded=False, softcap=False))
            found.append(coded_prefill(bf16, code, head_dim, bounded=False, softcap=False))
    return tuple(found)


def _rows(source: str, expression: str, struct: type[ctypes.Structure]) -> Variant:
    return Variant(source, expression, ROW_THREADS, 0, struct)


def _instance(template: str, *values: torch.dtype | int | bool) -> str:
    return f"{template}<{', '.join(map(_c_spelling, values))}>"


def _c_spelling(value: torch.dtype | int | bool) -> str:
    if isinstance(value, torch.dtype):
        return _C_NAMES[value]
    return str(value).lower() if isinstance(value, bool) else str(value)
