"""Bugs of the kernels that work on rows and on whole blocks. None makes one write where no check looks."""

from __future__ import annotations

from support import planted_checks as on
from support.planted_kernels import Bug, bug

WRITE, NORM, SILU, OCTET = "write_kv.cu", "rms_norm.cu", "silu_and_mul.cu", "octet.cuh"
COPY, PACK, COLUMNS = "copy_blocks.cu", "pack_blocks.cu", "columns.cuh"

UNORDERED_ROWS: dict[str, Bug] = {
    "rms_norm: no barrier before the warps' sums are added": bug(
        NORM, "__syncthreads();", "", on.long_rms_norm
    ),
}

ROW_BUGS: dict[str, Bug] = {
    "write_kv: padding goes to slot 0": bug(
        WRITE, "args.slot_mapping[row]", "max(args.slot_mapping[row], int64_t(0))", on.write_kv,
        within="args.slot_mapping[row];\n  const int64_t in_row",
    ),
    "write_kv: a slot beyond the pool is written": bug(
        WRITE, "BOUNDS_CHECK(slot < int64_t(kv.num_blocks) << kv.block_size_log2);", "", on.slot_beyond,
    ),
    "write_kv: values lie as far apart as keys": bug(
        WRITE, "row * args.value_stride", "row * args.key_stride", on.strides,
        within="(args.value) + row * args.value_stride + in_row",
    ),
    "write_kv: keys go to the values": bug(
        WRITE, "octet_at(static_cast<T*>(args.kv.values) + in_pool) = value;",
        "octet_at(static_cast<T*>(args.kv.values) + in_pool) = key;", on.write_kv,
    ),
    "rope: padding goes to slot 0": bug(
        WRITE, "args.slot_mapping[row]", "max(args.slot_mapping[row], int64_t(0))", on.rope,
        within="args.slot_mapping[row];\n  const T* from;",
    ),
    "rope: values lie as far apart as keys": bug(
        WRITE, "row * args.value_stride", "row * args.key_stride", on.strides,
        within="(args.value) + row * args.value_stride + value_head * args.head_dim;\n\n  uint4 low",
    ),
    "rope: the halves change places": bug(
        WRITE, "low_octet = pack_octet<T>(low);", "low_octet = pack_octet<T>(high);", on.rope,
    ),
    "rope: the high half turns by the low half's angles": bug(
        WRITE, "load_table(cos_high, cos + half);", "load_table(cos_high, cos);", on.rope,
    ),
    "rope: heads turn backwards": bug(
        WRITE, "__fsub_rn(low_cos, high_sin)", "__fadd_rn(low_cos, high_sin)", on.rope,
        within="low[i] = __fsub_rn(low_cos, high_sin)",
    ),
    "rope: a product is fused with the sum": bug(
        WRITE, "__fsub_rn(low_cos, high_sin)", "__fmaf_rn(-high[i], sin_low[i], low_cos)", on.rope,
        within="low[i] = __fsub_rn(low_cos, high_sin)",
    ),
    "rope: a product is not rounded as its tensor would be": bug(
        WRITE, "rounded_to<Wide>(__fmul_rn(low[i], cos_low[i]))", "__fmul_rn(low[i], cos_low[i])",
        on.rope_own,
    ),
    "rope: values turn too": bug(WRITE, "value_head < 0", "true", on.rope, within="if (value_head < 0) {"),
    "an octet reaches into the next row": bug(
        OCTET, "is_octet(from, count)", "uint64_t(from) % 16 == 0", on.rms_norm,
    ),
    "rms_norm: half a warp is added": bug(NORM, "distance > 0", "distance > 1", on.rms_norm),
    "rms_norm: epsilon is added to the root": bug(
        NORM, "sqrtf(mean + args.epsilon)", "(sqrtf(mean) + args.epsilon)", on.rms_norm,
    ),
    "rms_norm: epsilon is forgotten": bug(NORM, "sqrtf(mean + args.epsilon)", "sqrtf(mean)", on.rms_norm),
    "rms_norm: the residual sum is not rounded": bug(
        NORM, "rounded<T>(y[j] + x[j])", "y[j] + x[j]", on.rms_norm_residual,
    ),
    "rms_norm: the norm is not rounded before the weight": bug(
        NORM, "rounded<T>(x[j] * scale)", "x[j] * scale", on.rms_norm,
    ),
    "rms_norm: the residual is left out of the norm": bug(
        NORM, "has_residual ? summed : hidden", "hidden", on.rms_norm_residual,
    ),
    "rms_norm: heads lie beside each other": bug(
        NORM, "args.inner_stride", "args.size", on.rms_norm_of_heads,
        within="row % args.inner * args.inner_stride",
    ),
    "silu_and_mul: rows lie beside each other": bug(
        SILU, "args.gate_up_stride", "2 * args.size", on.silu_and_mul,
    ),
    "silu_and_mul: silu is not rounded": bug(
        SILU, "rounded<T>(silu) * up[j]", "silu * up[j]", on.silu_and_mul,
    ),
    "silu_and_mul: gate and up change places": bug(
        SILU, "gate_row + args.size + i", "gate_row + i", on.silu_and_mul,
    ),
}  # fmt: skip

BLOCK_BUGS: dict[str, Bug] = {
    "copy_blocks: a chain is walked backwards": bug(
        COPY, "args.moves[i]", "args.moves[args.chain_starts[chain] + args.chain_starts[chain + 1] - 1 - i]",
        on.copies,
    ),
    "copy_blocks: a cycle's bytes are not carried": bug(
        COPY, "columns.load(carried, args.pool, move.source);", "", on.copies,
    ),
    "copy_blocks: a block beyond the pool is written": bug(
        COPY, "BOUNDS_CHECK(move.destination >= kCarried && move.destination < args.num_blocks);", "",
        on.move_beyond,
    ),
    "a block has one column more": bug(
        COLUMNS, "first_ + i * kRowThreads < block_columns_", "first_ + i * kRowThreads <= block_columns_",
        on.one_copy,
    ),
    "columns of a thread are adjacent in stores": bug(
        COLUMNS, "to[i * kRowThreads]", "to[i]", on.one_copy, within="to[i * kRowThreads] = bytes[i]",
    ),
    "gather_blocks: packed by the grid's row": bug(
        PACK, "columns.store(args.packed, i, bytes);", "columns.store(args.packed, blockIdx.y, bytes);",
        on.packing,
    ),
    "scatter_blocks: to the blocks of the packed order": bug(
        PACK, "columns.store(args.pool, block, bytes);", "columns.store(args.pool, i, bytes);", on.packing,
    ),
    "gather_blocks: a block beyond the pool is read": bug(
        PACK, "BOUNDS_CHECK(block >= 0 && block < args.num_blocks);", "", on.id_beyond,
        within="BOUNDS_CHECK(block >= 0 && block < args.num_blocks);\n    uint4 bytes[kColumns];\n"
        "    columns.load(bytes, args.pool",
    ),
}  # fmt: skip
