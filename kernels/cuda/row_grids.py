"""The grid of each kernel that works on rows or on whole blocks; their headers say what a block does."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

from pageturner.kernels.cuda.arguments import (
    CopyBlocksArguments,
    KvWriteArguments,
    LowRankArguments,
    PackBlocksArguments,
    RmsNormArguments,
    SiluAndMulArguments,
)
from pageturner.kernels.cuda.runtime import MAX_GRID, Dim3
from pageturner.kernels.cuda.tiles import WARP_SIZE
from pageturner.kernels.cuda.variants import ROW_THREADS

OCTET = 8
"""Elements of one 16-byte access (octet.cuh)."""
COLUMNS = 4
COLUMN_BYTES = 16
"""Columns of a block that one thread owns, and their width (columns.cuh)."""
PIECE_ROWS, RANK_TILE, WARP_OUTPUTS = 16, 16, 32
"""Rows and ranks of a block of low_rank_shrink, outputs of a warp of low_rank_expand (low_rank.cu)."""
WARP_ROW_SIZE = WARP_SIZE * OCTET
"""The largest row that rms_norm gives to one warp (rms_norm.cu)."""


def write_kv(args: KvWriteArguments) -> Dim3:
    """A block takes one row and a stretch of its kv heads."""
    return args.num_rows, _blocks(args.num_kv_heads * args.head_dim, OCTET), 1


def rope_and_write_kv(args: KvWriteArguments) -> Dim3:
    """A thread turns two octets together; values come in two as well."""
    heads = args.num_heads + 2 * args.num_kv_heads
    return args.num_rows, _blocks(heads * args.head_dim, 2 * OCTET), 1


def coded_write_kv(args: KvWriteArguments, *, rotated: bool) -> Dim3:
    """Half a warp takes a head of a row: queries are among them where they are rotated."""
    heads = 2 * args.num_kv_heads + (args.num_heads if rotated else 0)
    return args.num_rows, ceil(heads * WARP_SIZE / 2 / ROW_THREADS), 1


def rms_norm(args: RmsNormArguments) -> Dim3:
    """A warp takes a short row, a block a long one."""
    rows = args.outer * args.inner
    rows_per_block = ROW_THREADS // WARP_SIZE if args.size <= WARP_ROW_SIZE else 1
    return ceil(rows / rows_per_block), 1, 1


def silu_and_mul(args: SiluAndMulArguments) -> Dim3:
    """A block takes one row and a stretch of its columns."""
    return args.num_rows, _blocks(args.size, OCTET), 1


def low_rank_shrink(args: LowRankArguments, num_pieces: int) -> Dim3:
    """A block takes a piece of rows and a tile of ranks."""
    return num_pieces, args.hidden_stride // RANK_TILE, 1


def low_rank_expand(args: LowRankArguments, num_pieces: int) -> Dim3:
    """A block takes a piece of rows and a stretch of a part's outputs."""
    starts = list(args.starts)
    sizes = [end - start for start, end in pairwise(starts)]
    parts = sum(size > 0 for size in sizes)
    return num_pieces, ceil(max(sizes) / (ROW_THREADS // WARP_SIZE * WARP_OUTPUTS)), parts


def copy_blocks(args: CopyBlocksArguments) -> Dim3:
    """Columns of a block by chains of copies; more chains than a grid has rows share them."""
    return _blocks(args.block_bytes, COLUMNS * COLUMN_BYTES), min(args.num_chains, MAX_GRID[1]), 1


def gather_blocks(args: PackBlocksArguments) -> Dim3:
    """Columns of a block by block ids."""
    return _blocks(args.block_bytes, COLUMNS * COLUMN_BYTES), min(args.num_ids, MAX_GRID[1]), 1


scatter_blocks = gather_blocks


def _blocks(total: int, per_thread: int) -> int:
    return ceil(total / (per_thread * ROW_THREADS))
