"""What planted bugs are looked for with: the checks of the kernels' own tests, on cases that show much at
head_dim 64, and a few of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from pageturner.kernels.cuda.block_moves import Move
from pageturner.kernels.cuda.row_grids import COLUMN_BYTES
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.errors import KernelFault
from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.layout import KvLayout
from support import row_kernels
from support.attention_kernels import AttentionCase, check_attention_kernels, run_attention
from support.block_checks import GROUP_BYTES, PAIRS, check_copy_blocks, check_pack_blocks, pool_of
from support.cuda_cases import cuda_ops
from support.kernel_checks import check_chunking
from support.row_checks import (
    LAYER,
    Heads,
    check_rms_norm,
    check_rope,
    check_silu_and_mul,
    check_write_kv,
    far_memory,
    normal,
    paged_rows,
)

Check = Callable[[Launcher], object]

BF16, FP16 = torch.bfloat16, torch.float16
HEADS = Heads(num_heads=9, num_kv_heads=3, head_dim=64)
WIDE = Heads(num_heads=32, num_kv_heads=16, head_dim=128, num_rows=5)  # several blocks of threads a row


def attention(*sequences: tuple[int, int], **others: object) -> Check:
    case = replace(AttentionCase(sequences), **others)  # type: ignore[arg-type]  # names are AttentionCase's
    return lambda launcher: check_attention_kernels(launcher, case)


# 350 keys are 22 tiles, 5 or 6 for each of 4 warps whose rings hold 3.
decode = attention((1, 1), (1, 15), (1, 17), (1, 350))
# The first of 4 rows ends in the tile before the last's.
decode_rows = attention((5, 5), (4, 17), (2, 130), (1, 64))
decode_blocks = attention((1, 100), (2, 40), block_size=32)
decode_96 = attention((1, 15), (1, 17), (1, 350), head_dim=96, group=5)
decode_256 = attention((1, 17), (2, 200), head_dim=256, num_kv_heads=1)
split = attention((1, 130), (3, 87), (1, 20), split=48, sinks=True, group=4)
# 280 keys are 5 steps of 64 in a ring of 2; 33 rows end in two of them. Rows of 4 heads are two row blocks.
prefill = attention((33, 280), num_kv_heads=1)
prefill_sinks = attention((40, 40), group=4, num_kv_heads=1, sinks=True)

# Windows that begin, for the first of some rows, with a tile; for the others, within it.
BOUNDED = {"dtype": FP16, "softcap": 3.0, "scale": 0.5, "group": 4, "sinks": True}
decode_window = attention((3, 295), (4, 20), (1, 38), window=37, split=16, **BOUNDED)
decode_chunk = attention((4, 195), (1, 64), (1, 65), chunk=64, **BOUNDED)
prefill_window = attention((70, 210), num_kv_heads=1, window=50, **BOUNDED)
prefill_wide_window = attention((6, 331), num_kv_heads=1, window=200, **BOUNDED)
prefill_chunk = attention((90, 190), num_kv_heads=1, chunk=48, window=40, **BOUNDED)

# Scores that rise by hundreds of powers of two; and, in float16, by some twenty.
rising = attention((1, 350), (20, 150), num_kv_heads=1, scale=30.0)
rising_split = attention((1, 350), num_kv_heads=1, scale=30.0, split=48)
rising_float16 = attention((4, 350), window=1000, dtype=FP16, softcap=1000.0, scale=1.5)


def no_keys(launcher: Launcher) -> None:
    """A row of padding sees none, and gives zeros."""
    paged, spec = AttentionCase(((1, 20), (1, 40))).build()
    paged.batch.seq_lens[0] = 0
    result = run_attention(launcher, paged, spec)
    assert torch.equal(result[0], torch.zeros_like(result[0]))


def item_within_a_tile(launcher: Launcher) -> None:
    paged, spec = AttentionCase(((1, 90),)).build()
    must_stop(lambda: run_attention(launcher, paged, spec, split=40))


def merged_queries(launcher: Launcher) -> None:
    """As a merged projection hands them over."""
    paged, spec = AttentionCase(((9, 60), (1, 40))).build()
    expected = run_attention(launcher, paged, spec)
    num_rows, num_heads, head_dim = paged.query.shape
    merged = paged.query.new_full((num_rows, num_heads + 4, head_dim), torch.nan)[:, :num_heads]
    merged.copy_(paged.query)
    assert torch.equal(run_attention(launcher, replace(paged, query=merged), spec), expected)


def far_block(launcher: Launcher) -> None:
    """A pool of more than 2^31 elements, of which only the pages that are touched exist."""
    paged, spec = AttentionCase(((1, 16),)).build()
    expected = run_attention(launcher, paged, spec)
    with TemporaryDirectory() as folder:
        _, *page = paged.kv_layer.shape
        far = 2**30
        memory = far_memory(Path(folder, "pool"), 3 * far, BF16)
        pool = memory.as_strided((3, *page), (far, *torch.empty(page).stride()))
        pool[2] = paged.kv_layer[paged.batch.block_tables[0, 0]]
        paged.batch.block_tables[0, 0] = 2
        assert torch.equal(run_attention(launcher, replace(paged, kv_layer=pool), spec), expected)


def beside(launcher: Launcher) -> None:
    """A row has the same bits whatever runs beside it."""
    paged, spec = AttentionCase(((5, 120), (17, 90)), scale=2.0).build()
    whole = run_attention(launcher, paged, spec)
    for row in (0, 5):
        others = paged.query.clone()
        others[torch.arange(len(others)) != row] = 0
        assert torch.equal(run_attention(launcher, replace(paged, query=others), spec)[row], whole[row])


def chunking(launcher: Launcher) -> None:
    """A prompt computed in pieces has the bits of the prompt computed whole."""
    spec = AttentionSpec(scale=0.5, sliding_window=100, logit_softcap=3.0)
    check_chunking(cuda_ops(launcher), KvLayout(2, 2, 64, 16, FP16), 300, [37, 90, 150, 199], 3, spec)


def write_kv(launcher: Launcher) -> None:
    check_write_kv(launcher, HEADS, BF16)


def wide_rows(launcher: Launcher) -> None:
    check_write_kv(launcher, WIDE, BF16)


def wide_rope(launcher: Launcher) -> None:
    check_rope(launcher, WIDE, BF16, torch.float32)


def rope(launcher: Launcher) -> None:
    check_rope(launcher, HEADS, BF16, torch.float32)


def rope_own(launcher: Launcher) -> None:
    check_rope(launcher, HEADS, BF16, BF16)


def strides(launcher: Launcher) -> None:
    """Keys and values whose rows are not equally far apart."""
    pool, batch = paged_rows(HEADS, BF16)
    memory = normal(HEADS.num_rows, 5, HEADS.num_kv_heads, HEADS.head_dim, dtype=BF16, seed=1)
    key, value = memory[:, 0], memory[:, 1:3].contiguous()[:, 1]
    row_kernels.write_kv(launcher, key, value, pool[:, LAYER], batch.slot_mapping)
    ones, zeros = torch.ones(HEADS.num_rows, 64), torch.zeros(HEADS.num_rows, 64)
    turned = pool.clone()
    rotated = row_kernels.rope_and_write_kv(
        launcher, key, key, value, ones, zeros, turned[:, LAYER], batch.slot_mapping
    )
    assert torch.equal(rotated, key)
    written = batch.slot_mapping >= 0
    blocks, offsets = (
        (batch.slot_mapping // HEADS.block_size)[written],
        (batch.slot_mapping % HEADS.block_size)[written],
    )
    for after in (pool, turned):
        assert torch.equal(after[blocks, LAYER, 0, :, offsets], key[written])
        assert torch.equal(after[blocks, LAYER, 1, :, offsets], value[written])


def slot_beyond(launcher: Launcher) -> None:
    """The pool is the beginning of a larger one, so that a write beyond its end harms no other memory."""
    pool, batch = paged_rows(HEADS, BF16)
    key = normal(HEADS.num_rows, HEADS.num_kv_heads, HEADS.head_dim, dtype=BF16, seed=1)
    slots = batch.slot_mapping.clamp(max=(len(pool) - 1) * HEADS.block_size)
    slots[5] = (len(pool) - 1) * HEADS.block_size
    must_stop(lambda: row_kernels.write_kv(launcher, key, key, pool[:-1, LAYER], slots))


def move_beyond(launcher: Launcher) -> None:
    must_stop(lambda: row_kernels.run_chains(launcher, pool_of(64)[:-1], [[Move(0, 9)]]))


def id_beyond(launcher: Launcher) -> None:
    must_stop(lambda: row_kernels.gather_blocks(launcher, pool_of(64)[:-1], [9]))


def must_stop(launch: Callable[[], object]) -> None:
    try:
        launch()
    except KernelFault:
        return
    raise AssertionError("the kernel has left its arrays")


def rms_norm(launcher: Launcher) -> None:
    for size in (64, 100, 576):
        check_rms_norm(launcher, (9, 1, size), BF16, residual=False)


def long_rms_norm(launcher: Launcher) -> None:
    check_rms_norm(launcher, (9, 1, 576), BF16, residual=False)


def rms_norm_of_heads(launcher: Launcher) -> None:
    check_rms_norm(launcher, (7, 3, 60), BF16, residual=False, rows="padded")


def rms_norm_residual(launcher: Launcher) -> None:
    for size in (8, 64, 576):
        check_rms_norm(launcher, (9, 1, size), BF16, residual=True)


def silu_and_mul(launcher: Launcher) -> None:
    check_silu_and_mul(launcher, 4, 1536, BF16, gap=8)


def copies(launcher: Launcher) -> None:
    for pairs in PAIRS.values():
        check_copy_blocks(launcher, pairs, block_bytes=1040)


def one_copy(launcher: Launcher) -> None:
    for block_bytes in (1040, GROUP_BYTES - COLUMN_BYTES):
        check_copy_blocks(launcher, PAIRS["one"], block_bytes)


def large_copy(launcher: Launcher) -> None:
    check_copy_blocks(launcher, PAIRS["one"], GROUP_BYTES + COLUMN_BYTES)


def packing(launcher: Launcher) -> None:
    check_pack_blocks(launcher, [7, 0, 3, 9, 8], block_bytes=1040, most_rows=2)
