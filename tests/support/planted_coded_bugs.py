"""Bugs of the kernels over codes."""

from __future__ import annotations

from collections.abc import Callable

from pageturner.kernels.cuda import variants
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.layout import KvLayout
from support.coded import check_coded_writes
from support.coded_kernels import BF16, FP8, INT8, CodedCase, check_coded_kernels
from support.cuda_cases import cuda_ops
from support.planted_kernels import Bug, bug

DECODE, PREFILL, TILE, WRITE = "coded_decode.cu", "coded_prefill.cu", "code_tile.cuh", "write_kv.cu"
EXCHANGE = "lanes = kHalfWarp / 2; lanes > 0; lanes /= 2) "


def _attention(case: CodedCase) -> Callable[[Launcher], object]:
    return lambda launcher: check_coded_kernels(launcher, case)


def writes(launcher: Launcher) -> None:
    for code in (INT8, FP8):
        check_coded_writes(cuda_ops(launcher), KvLayout(2, 1, 64, 16, code), BF16)


decode = _attention(CodedCase(((1, 15), (1, 17), (1, 350)), INT8))
decode_blocks = _attention(CodedCase(((1, 100),), INT8, block_size=32))
decode_fp8 = _attention(CodedCase(((1, 17), (1, 90)), FP8))
prefill = _attention(CodedCase(((33, 280),), INT8))

CODED_BUGS: dict[str, Bug] = {
    "codes: scales of no sequence are copied": bug(TILE, "count * kScaleBytes", "16", decode),
    "codes: scales lie a byte apart": bug(TILE, "in_block * kScaleBytes", "in_block", decode_blocks),
    "codes: scales go by row": bug(TILE, "column * 2 + i % 2", "column * 2 + i / 2", decode),
    "codes: numbers are not swizzled": bug(
        TILE, "swizzled<kHeadDim>(row, chunk + half)", "row * kHeadDim + (chunk + half) * 8", decode,
    ),
    "codes: an int8 has no sign": bug(
        TILE, "(raised & 0xff80ff80u) ^ 0x80008000u", "0xc300c300u", decode,
    ),
    "codes: a float of 8 bits lies a bit too high": bug(
        TILE, "(high & 0x7f007f00u) >> 4", "(high & 0x7f007f00u) >> 3", decode_fp8,
    ),
    "codes: keys have their values' scales": bug(DECODE, "codes.key_scales", "codes.value_scales", decode),
    "codes: values have no scale": bug(
        DECODE, "apply_scales<1, kTileKeys>(scores, codes.value_scales);", "", decode,
    ),
    "codes: a scale is that of half a head": bug(
        WRITE, "kHalfWarp / 2", "kHalfWarp / 4", writes, within=EXCHANGE + "top",
    ),
    "codes: a scale's error is that of half a head": bug(
        WRITE, "kHalfWarp / 2", "kHalfWarp / 4", writes, within=EXCHANGE + "sum",
    ),
    "codes: of scales as good the last is taken": bug(WRITE, "sum < least", "sum <= least", writes),
    "codes: the largest of the scales is not tried": bug(WRITE, "k < kScales", "k < kScales - 1", writes),
    "codes: errors are counted in steps of their own scale": bug(
        WRITE, "__fmul_rn(to_float(candidate), of_smallest)", "1.0f", writes,
    ),
    "codes: a scale whose inverse is infinite counts": bug(
        WRITE, "to_float(scale) >= 0x1p-126f", "to_float(scale) > 0.0f", writes,
    ),
    "codes: what is no number is written as zeros": bug(WRITE, "is_finite ? 0 : 0x7fc0", "0", writes),
}  # fmt: skip

UNORDERED_CODED: dict[str, Bug] = {
    "codes: no barrier before a warp makes numbers": bug(
        DECODE, "__syncwarp();", "", decode, within="__syncwarp();  // all lanes' copies",
    ),
    "codes: no barrier before a warp reads numbers": bug(
        DECODE, "__syncwarp();", "", decode, within="__syncwarp();  // all lanes' numbers",
    ),
    "codes: a wait lets one group too many pass": bug(
        DECODE, "cp_async_wait<kStages - 2>();", "cp_async_wait<kStages - 1>();", decode,
    ),
    "codes: no barrier before a block makes numbers": bug(
        PREFILL, "__syncthreads();", "", prefill, within="__syncthreads();  // all warps' copies",
    ),
    "codes: no barrier before a block reads numbers": bug(
        PREFILL, "__syncthreads();", "", prefill, within="__syncthreads();  // all threads' numbers",
    ),
}  # fmt: skip

CODED_WATCHED = (
    variants.coded_decode(BF16, INT8, 64, bounded=False, softcap=False),
    variants.coded_prefill(BF16, INT8, 64, bounded=False, softcap=False),
)
CODED_VARIANTS = (
    CODED_WATCHED[0],
    variants.coded_decode(BF16, FP8, 64, bounded=False, softcap=False),
)
