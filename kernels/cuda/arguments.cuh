// What a launch passes: one struct a kernel, by value. arguments.py mirrors each, and tests compare both.
#pragma once

#include "primitives.cuh"

// Threads of a block of every kernel but attention: variants.ROW_THREADS.
constexpr int kRowThreads = 128;

// One layer of the KV pool, with PLAIN key pages (see kernels/layout.py). Strides in elements.
//
//   element(block, head, offset, dim) = block * block_stride + head * head_stride + offset * head_dim + dim
//   of `keys` and of `values` alike
struct KvLayer {
  void* keys;
  void* values;
  int64_t block_stride;
  int64_t head_stride;
  int32_t num_blocks;
  int32_t block_size_log2;  // a block holds 16, 32, 64 or more tokens, a power of two
};

// Keys [first_key, end_key) of one sequence, for all its rows: the work of one block of paged_decode. first_key is a
// multiple of 16, and so is end_key unless it is the sequence's.
// partial: where its unfinished result goes; -1: it is the only item of its sequence, and writes the output.
// Items are aligned for one load each.
struct alignas(16) DecodeItem { int32_t sequence, first_key, end_key, partial; };

// The partials [first_partial, first_partial + num_partials) of one sequence, to be added in this order.
struct alignas(16) MergeItem { int32_t sequence, first_partial, num_partials, unused; };

// Packed rows from first_row on of one sequence: the work of one block of paged_prefill.
struct alignas(8) PrefillTile { int32_t sequence, first_row; };

// Attention of one layer: of paged_decode, decode_merge and paged_prefill.
//
// The query heads that share a kv head are *packed* as rows, so that its keys are read once for all of them: see
// PackedRows in sequence.cuh.
struct AttentionArguments {
  void* output;                    // [T, num_heads, head_dim], contiguous
  const void* query;               // [T, num_heads, head_dim], rows query_stride apart
  KvLayer kv;
  const int32_t* query_start_loc;  // [S + 1]
  const int32_t* seq_lens;         // [S], keys including this step's own rows
  const int32_t* block_tables;     // [S, table_stride]
  const float* sinks;              // [num_heads], or null: a logit that joins the denominator only
  const DecodeItem* decode_items;
  const int32_t* num_decode_items;  // one number on the device: blocks beyond it exit, so the grid can be fixed
  const MergeItem* merge_items;
  const int32_t* num_merge_items;   // the same
  const PrefillTile* prefill_tiles;
  float* partial_outputs;          // [partials, num_kv_heads, 16, head_dim], not yet divided by the sum
  float2* partial_sums;            // [partials, num_kv_heads, 16]: anchor (see attention_tile.cuh) and sum
  int64_t query_stride;            // elements
  int32_t table_stride;
  int32_t num_kv_heads;
  int32_t group;                   // query heads a kv head
  int32_t window;                  // keys that a row sees, its own included; 0: all
  int32_t chunk;                   // a row sees only keys of its own chunk of so many positions; 0: all
  float scale;                     // of scores; above 0, unless they are capped
  float softcap;                   // scores become softcap * tanh(score / softcap), where compiled in
};

// write_kv and rope_and_write_kv.
struct KvWriteArguments {
  const void* key;              // [T, num_kv_heads, head_dim], rows key_stride apart
  const void* value;            // the same, value_stride apart
  const void* query;            // [T, num_heads, head_dim], rows query_stride apart; rope only, as the next three
  void* rotated_query;          // [T, num_heads, head_dim], contiguous
  const void* cos;              // [T, head_dim], contiguous
  const void* sin;
  KvLayer kv;
  const int64_t* slot_mapping;  // [T]; -1 writes nothing
  int64_t key_stride, value_stride, query_stride;  // elements
  int32_t num_rows, num_heads, num_kv_heads, head_dim;
};

struct RmsNormArguments {
  const void* hidden;    // [outer, inner, size], strided by outer_stride and inner_stride
  const void* residual;  // [outer, inner, size], contiguous, or null
  const void* weight;    // [size]
  void* normed;          // [outer, inner, size], contiguous
  void* summed;          // the same, null where there is no residual
  int64_t outer_stride, inner_stride;  // elements
  int32_t outer, inner, size;
  float epsilon;
};

struct SiluAndMulArguments {
  const void* gate_up;  // [rows, 2 * size], rows gate_up_stride apart
  void* output;         // [rows, size], contiguous
  int64_t gate_up_stride;  // elements
  int32_t num_rows, size;
};

// One step of a chain of block copies. source -1: the carried block (see copy_blocks.cu);
// destination -1: carry the source.
struct BlockMove { int32_t source, destination; };

struct CopyBlocksArguments {
  void* pool;                   // blocks of block_bytes, adjacent
  const BlockMove* moves;       // chain by chain
  const int32_t* chain_starts;  // [num_chains + 1], into moves
  int64_t block_bytes;          // a multiple of 16
  int32_t num_chains, num_blocks;
};

// gather_blocks (pool -> packed) and scatter_blocks (packed -> pool).
struct PackBlocksArguments {
  void* pool;
  void* packed;              // [num_ids] blocks, adjacent
  const int32_t* block_ids;  // [num_ids]
  int64_t block_bytes;       // a multiple of 16
  int32_t num_ids, num_blocks;
};

// One adapter's part in one product (kernels/low_rank.py): outputs in up to three parts, each with an A and a B.
struct LowRankFactors {
  const void* a;     // [ranks of all parts, in_features]; null: it leaves the product as it is
  const void* b[3];  // [outputs, rank] of each part
  int32_t ranks[3];  // multiples of 8; 0: it leaves the part as it is
  int32_t unused;
};

// Rows of one adapter, at most 16: row_ids[first .. first + count). Aligned for one load.
struct alignas(16) LowRankPiece { int32_t adapter, first, count, unused; };

constexpr int kMostAdapters = 32;  // of one launch: arguments.MOST_ADAPTERS

// low_rank_shrink and low_rank_expand.
struct LowRankArguments {
  const void* rows;            // [num_rows, in_features], rows row_stride apart
  void* output;                // [num_rows, outputs of all parts], rows output_stride apart
  void* hidden;                // [rows of adapters, hidden_stride], in the order of row_ids
  const LowRankPiece* pieces;  // one a block of the grid's x
  const int32_t* row_ids;
  int64_t row_stride, output_stride;  // elements, as hidden_stride: a multiple of 16
  int32_t num_rows, in_features, hidden_stride, first_adapter;
  int32_t starts[4];           // of the parts in the output, and the end
  LowRankFactors factors[kMostAdapters];  // of the adapters from first_adapter on
};
