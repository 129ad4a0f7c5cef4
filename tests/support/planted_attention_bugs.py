"""Bugs of the attention kernels. Those of one kind differ in where they show, not in how they come about."""

from __future__ import annotations

from support import planted_checks as on
from support.planted_kernels import Bug, Edit, bug

DECODE, PREFILL = "paged_decode.cu", "paged_prefill.cu"
TILE, SHARED, SEQUENCE = "attention_tile.cuh", "shared_tile.cuh", "sequence.cuh"
DECODE_ROWS = "decode_rows.cuh"

NEXT_STAGE = "stage = stage + 1 == kStages ? 0 : stage + 1;"

UNORDERED_ATTENTION: dict[str, Bug] = {
    "decode: no barrier before a warp reads its stage": bug(DECODE, "__syncwarp();", "", on.decode),
    "decode: no barrier before the rings become the merge's": bug(
        DECODE, "__syncthreads();", "", on.decode, within="__syncthreads();  // the rings are free",
    ),
    "decode: no barrier before the warps are merged": bug(
        DECODE, "__syncthreads();", "", on.decode, within="__syncthreads();  // all results",
    ),
    "decode: no barrier after the copy of the queries": bug(
        DECODE, "__syncthreads();", "", on.decode_256,
        within="__syncthreads();               // all threads' parts",
    ),
    "decode: the queries are not waited for": bug(
        DECODE, "cp_async_wait<kStages - 1>();", "cp_async_wait<kStages>();", on.decode_256,
    ),
    "decode: a wait lets one group too many pass": bug(
        DECODE, "cp_async_wait<kStages - 2>();", "cp_async_wait<kStages - 1>();", on.decode,
    ),
    "decode: copies are not committed": bug(
        DECODE, "cp_async_commit();", "", on.decode, within="cp_async_commit();\n  };",
    ),
    "decode: tiles are computed from the wrong stage": bug(
        DECODE, "stage + 1 == kStages", "stage + 2 == kStages", on.decode, within=NEXT_STAGE,
    ),
    "decode: tiles are copied to the wrong stage": bug(
        DECODE, "copy_stage + 1 == kStages", "copy_stage + 2 == kStages", on.decode,
    ),
    "decode: a warp's copies run a tile ahead of its stages": bug(
        DECODE, "stage < kStages - 1", "stage < kStages", on.decode,
        within="stage < kStages - 1; ++stage) start_copy",
    ),
    "decode: a copy starts before the barrier": Bug(
        (
            Edit(DECODE, "__syncwarp();", "start_copy(); __syncwarp();"),
            Edit(DECODE, "start_copy();", "", within="start_copy();  // ... which this overwrites"),
        ),
        on.decode,
    ),
    "prefill: no barrier in the loop": bug(PREFILL, "__syncthreads();", "", on.prefill),
    "prefill: a wait lets one group too many pass": bug(
        PREFILL, "cp_async_wait<kStages - 2>();", "cp_async_wait<kStages - 1>();", on.prefill,
    ),
    "prefill: copies are not committed": bug(PREFILL, "cp_async_commit();", "", on.prefill),
    "prefill: a copy starts before the barrier": Bug(
        (
            Edit(PREFILL, "__syncthreads();", "start_copy(); __syncthreads();"),
            Edit(PREFILL, "start_copy();", "", within="start_copy();     // ... which this overwrites"),
        ),
        on.prefill,
    ),
    "prefill: steps are computed from the wrong stage": bug(
        PREFILL, "stage + 1 == kStages", "stage + 2 == kStages", on.prefill, within=NEXT_STAGE,
    ),
    "prefill: steps are copied to the wrong stage": bug(
        PREFILL, "copy_stage + 1 == kStages", "copy_stage + 2 == kStages", on.prefill,
    ),
    "a lane decides alone whether anchors move": bug(
        TILE, "__any_sync(kFullWarp, any_above)", "any_above", on.decode,
    ),
    "half the lanes come to an exchange": bug(
        TILE,
        "sum[tile][half] += __shfl_xor_sync(kFullWarp, sum[tile][half], 1);",
        "if (threadIdx.x % 2 == 0) sum[tile][half] += __shfl_xor_sync(kFullWarp, sum[tile][half], 1);",
        on.decode,
    ),
}  # fmt: skip

MASKS: dict[str, Bug] = {
    "decode: a row sees one key too many": bug(
        SEQUENCE, "rows.position(row) + 1", "rows.position(row) + 2", on.decode_rows,
    ),
    "prefill: a row sees one key too many": bug(
        SEQUENCE, "rows.position(row) + 1", "rows.position(row) + 2", on.prefill,
    ),
    "a row does not see its own key": bug(
        SEQUENCE, "rows.position(row) + 1", "rows.position(row)", on.decode,
    ),
    "speculative rows see what the last sees": bug(
        SEQUENCE, "rows.position(row) + 1", "rows.position(rows.count - 1) + 1", on.decode_rows,
    ),
    "the window is one key too wide": bug(
        SEQUENCE, "position - window + 1", "position - window", on.decode_window,
    ),
    "the window is one key too narrow": bug(
        SEQUENCE, "position - window + 1", "position - window + 2", on.prefill_window,
    ),
    "a chunk begins one key early": bug(
        SEQUENCE, "position - position % chunk", "position - position % chunk - 1", on.decode_chunk,
    ),
    "a chunk ends one key early": bug(
        SEQUENCE, "position - position % chunk", "position + 1 - (position + 1) % chunk", on.prefill_chunk,
    ),
    "decode: an item may begin within a tile": bug(
        DECODE, "BOUNDS_CHECK(item.first_key % kTileKeys == 0);", "", on.item_within_a_tile,
    ),
    "decode: an item takes some of the next one's keys": bug(
        DECODE, "key < item.end_key", "key < item.end_key + kTileKeys", on.split,
        within="key = first_tile; key < item.end_key",
    ),
    "decode: no mask where the last row needs none": bug(
        DECODE, "of_first.end", "of_last.end", on.decode_rows, within="{of_last.first, of_first.end}",
    ),
    "decode: no mask where the first row's window needs none": bug(
        DECODE, "of_last.first", "of_first.first", on.decode_window, within="{of_last.first, of_first.end}",
    ),
    "prefill: no mask where the last row needs none": bug(
        PREFILL, "of_first.end", "of_last.end", on.prefill, within="{of_last.first, of_first.end}",
    ),
    "prefill: no mask where the first row's window needs none": bug(
        PREFILL, "of_last.first", "of_first.first", on.prefill_wide_window,
        within="{of_last.first, of_first.end}",
    ),
    "a tile across the causal edge is not masked": bug(
        SEQUENCE, "first_key + num_keys <= end", "first_key < end", on.prefill,
    ),
    "prefill: the walk begins where the last row's window does": bug(
        PREFILL, "of_first.first / kKeys * kKeys", "of_last.first / kKeys * kKeys", on.prefill_window,
    ),
    "prefill: steps begin where the cut of the prompt has them": bug(
        PREFILL, "of_first.first / kKeys * kKeys", "of_first.first / kTileKeys * kTileKeys", on.chunking,
    ),
    "prefill: all row blocks have the limits of the first": bug(
        PREFILL, "tile.first_row + row", "row", on.prefill_sinks,
        within="end_of_visible_keys(rows, tile.first_row + row)",
    ),
    "prefill: a tile ends with its first row's key": bug(
        PREFILL, "min(tile.first_row + kRows, rows.count) - 1", "tile.first_row", on.prefill,
    ),
    "decode: values behind the item's end are copied": bug(
        DECODE, "item.end_key - copy_key", "kTileKeys", on.decode,
        within="values + offset, item.end_key - copy_key",
    ),
    "prefill: values behind the end are copied": bug(
        PREFILL, "end_key - key", "kTileKeys", on.prefill, within="key), end_key - key)",
    ),
    "slots of no sequence are copied": bug(SHARED, "index < num_chunks", "true", on.decode),
    "the last key is not copied": bug(
        SHARED, "num_rows * kChunks - lane", "(num_rows - 1) * kChunks - lane", on.decode,
    ),
}  # fmt: skip

ADDRESSES: dict[str, Bug] = {
    "keys and values are written without a swizzle": bug(
        SHARED, "swizzled<kHeadDim>(index / kChunks, index % kChunks)", "index * kChunkElements", on.decode,
    ),
    "head_dim 96 is written with half the swizzle's rows": bug(
        SHARED,
        "swizzled<kHeadDim>(index / kChunks, index % kChunks)",
        "index / kChunks * kHeadDim + (index % kChunks ^ index / kChunks % 4) * kChunkElements",
        on.decode_96,
    ),
    "keys are read as queries are": bug(
        SHARED,
        "swizzled<kHeadDim>(lane % 8 + lane / 16 * 8, step * 2 + lane / 8 % 2)",
        "swizzled<kHeadDim>(lane % 16, step * 2 + lane / 16)",
        on.decode,
    ),
    "values are read as keys are": bug(
        SHARED, "rows_first[step % kPeriod]", "chunks_first[step % kPeriod]", on.decode,
        within="ldmatrix_x4_transposed(registers, tile + rows_first[step % kPeriod]",
    ),
    "queries are written without a swizzle": bug(
        SEQUENCE, "swizzled<kHeadDim>(row, chunk)", "index * kChunkElements", on.prefill,
    ),
    "decode: the block of the tile before": bug(
        DECODE,
        "copy_block = pages.block_of(copy_key);",
        "copy_block = pages.block_of(copy_key - kTileKeys);",
        on.decode,
    ),
    "decode: the table is read behind the end": bug(
        DECODE, "copy_key < item.end_key", "true", on.decode,
        within="if (copy_key < item.end_key) copy_block",
    ),
    "decode: warps walk every tile": bug(
        DECODE, "copy_key += kWarps * kTileKeys;", "copy_key += kTileKeys;", on.decode,
    ),
    "prefill: the block of the tile before": bug(
        PREFILL, "block_of_part(part)", "block_of_part(part - 2)", on.prefill,
        within="++part) copy_blocks[part] = block_of_part(part);",
    ),
    "prefill: the table is read behind the end": bug(
        PREFILL, "key < end_key ? pages.block_of(key) : 0", "pages.block_of(key)", on.prefill,
    ),
    "a lane masks columns that are not its own": bug(
        TILE, "column_of_lane()", "int(threadIdx.x) % 4", on.decode, within="column_of_lane() + i % 2",
    ),
    "decode: a lane leaves its output in a neighbour's column": bug(
        DECODE_ROWS, "column_of_lane()", "int(threadIdx.x) % 4", on.decode,
        within="[dims * 8 + column_of_lane()]",
    ),
    "positions rise by query head": bug(
        SEQUENCE, "row / group", "row", on.decode_rows, within="first_position + row / group",
    ),
    "query heads are dealt to kv heads in turn": bug(
        SEQUENCE, "kv_head * group + row % group", "row % group * (num_heads / group) + kv_head", on.decode,
    ),
    "packed rows are dealt to tokens in turn": bug(
        SEQUENCE, "first_token + row / group", "first_token + row % (count / group)", on.decode_rows,
    ),
    "rows begin where the next sequence's do": bug(
        SEQUENCE, "arguments.query_start_loc[sequence]", "arguments.query_start_loc[sequence + 1]", on.decode,
        within="first_token(arguments.query_start_loc[sequence])",
    ),
    "decode: queries lie as if they were no part of a wider row": bug(
        DECODE_ROWS, "arguments.query_stride", "rows.num_heads * kHeadDim", on.merged_queries,
        within="rows.offset<kHeadDim>(row, arguments.query_stride)",
    ),
    "prefill: queries lie as if they were no part of a wider row": bug(
        SEQUENCE, "arguments.query_stride", "rows.num_heads * kHeadDim", on.merged_queries,
        within="rows.offset<kHeadDim>(first_row + row, arguments.query_stride)",
    ),
    "prefill: all row blocks have the queries of the first": bug(
        SEQUENCE, "first_row + row", "row", on.prefill_sinks,
        within="rows.offset<kHeadDim>(first_row + row, arguments.query_stride)",
    ),
    "prefill: a warp's row tiles share their queries": bug(
        PREFILL, "warp_row + row_tile * kMmaRows", "warp_row", on.prefill,
        within="query_tile + (warp_row + row_tile * kMmaRows)",
    ),
    "kv heads share the first one's values": bug(
        SEQUENCE, "kv_head * arguments.kv.head_stride", "0", on.decode,
        within="(arguments.kv.values) + kv_head * arguments.kv.head_stride",
    ),
    "sequences share the first one's table": bug(
        SEQUENCE, "int64_t(sequence) * arguments.table_stride", "int64_t(0)", on.decode,
    ),
    "blocks are taken to hold 16 tokens": bug(
        SEQUENCE, "(1 << block_size_log2) - 1", "15", on.decode_blocks,
    ),
    "a block lies no further than 32 bits": bug(
        SEQUENCE, "wide_product(block, block_stride)", "int64_t(block * block_stride)", on.far_block,
    ),
    "partials of kv heads lie on each other": bug(
        DECODE_ROWS, "int64_t(partial) * arguments.num_kv_heads + kv_head", "int64_t(partial) + kv_head",
        on.split,
    ),
    "the merge takes partials to be one kv head apart": bug(
        DECODE, "int64_t(arguments.num_kv_heads) * kMmaRows", "int64_t(kMmaRows)", on.split,
    ),
    "partial 0 is taken for a whole result": bug(
        DECODE_ROWS, "partial < 0", "partial <= 0", on.split,
    ),
}  # fmt: skip

NUMBERS: dict[str, Bug] = {
    "a row's sum is that of two of its lanes": bug(
        TILE, "sum[tile][half] += __shfl_xor_sync(kFullWarp, sum[tile][half], 2);", "", on.decode,
    ),
    "a row's anchor is that of two of its lanes": bug(
        TILE, "highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 2));", "", on.decode,
    ),
    "the anchor does not move": bug(TILE, "sums.anchor[tile][half] = moved;", "", on.rising),
    "the sum does not follow the anchor": bug(TILE, "sums.sum[tile][half] *= factor;", "", on.rising),
    "every other output does not follow the anchor": bug(
        TILE, "sums.output[tile][dims][half * 2 + 1] *= factor;", "", on.rising,
    ),
    "weights may grow beyond float16": bug(
        TILE, "kAnchorSlack", "24.0f", on.rising_float16, within="-anchor) > kAnchorSlack",
    ),
    "a row's anchor moves when a neighbour's does": bug(
        TILE, "is_above(highest, unit, anchor) ? highest * unit : anchor", "fmaxf(highest * unit, anchor)",
        on.beside,
    ),
    "scores are not divided by the cap": bug(
        TILE, "arguments.scale / arguments.softcap", "arguments.scale", on.decode_window,
    ),
    "capped scores keep the scale as their unit": bug(
        TILE, "kSoftcap ? arguments.softcap : arguments.scale", "arguments.scale", on.prefill_wide_window,
    ),
    "scores are not capped": bug(
        TILE, "tanh_approximate(score * inside)", "score * inside", on.decode_chunk,
    ),
    "weights go to the wrong register": bug(TILE, "2 * part + i / 2", "2 * part + i % 2", on.decode),
    "a sink does not rescale the rest": bug(
        TILE, "exp2_approximate(anchor - highest)", "1.0f", on.prefill_sinks,
    ),
    "a sink is no power of two": bug(TILE, "sinks[head] * kLog2E", "sinks[head]", on.split),
    "a sink joins every partial": bug(
        DECODE_ROWS,
        "arguments.partial_sums[place] = sums;",
        "arguments.partial_sums[place] = make_float2(sums.x, sums.y + (arguments.sinks == nullptr ? 0.0f : "
        "exp2_approximate(arguments.sinks[rows.head(row)] * kLog2E - sums.x)));",
        on.split,
    ),
    "a row without keys is divided by its sum": bug(
        TILE, "if (!(sum > 0.0f)) return 0.0f;", "", on.no_keys,
    ),
    "parts of a row are added as if of one anchor": bug(
        DECODE_ROWS, "exp2_approximate(part_sums.x - sums.x)", "1.0f", on.decode,
    ),
    "an anchor is the last part's": bug(
        DECODE, "fmaxf(anchor, part_sums[part * stride].x)", "part_sums[part * stride].x", on.rising_split,
    ),
    "the merge leaves out the last partial": bug(
        DECODE, "part < item.num_partials", "part + 1 < item.num_partials", on.split,
        within="part < item.num_partials; ++part) {",
    ),
}  # fmt: skip

ATTENTION_BUGS = MASKS | ADDRESSES | NUMBERS
