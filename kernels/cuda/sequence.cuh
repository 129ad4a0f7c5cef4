// One sequence of the batch, as one kv head sees it: its packed rows, the keys each row may see, and its pages.
#pragma once

#include "arguments.cuh"
#include "shared_tile.cuh"

// The rows that a sequence computes in this step. The query heads that share a kv head are packed as rows: packed
// row r is token r / group of the step, query head kv_head * group + r % group.
//
//   group 3    row  0 1 2 | 3 4 5 | 6 7 8 | ..
//            token    0   |   1   |   2   | ..     at positions first_position, first_position + 1 ..
struct PackedRows {
  int first_token;     // of the sequence, in the batch
  int first_position;  // of that token
  int count;           // packed rows
  int group;
  int kv_head;
  int num_heads;

  __device__ __forceinline__ PackedRows(const AttentionArguments& arguments, int sequence, int kv_head)
      : first_token(arguments.query_start_loc[sequence]), group(arguments.group), kv_head(kv_head),
        num_heads(arguments.num_kv_heads * arguments.group) {
    const int num_tokens = arguments.query_start_loc[sequence + 1] - first_token;
    first_position = arguments.seq_lens[sequence] - num_tokens;
    count = num_tokens * group;
  }

  __device__ __forceinline__ int position(int row) const { return first_position + row / group; }

  __device__ __forceinline__ int head(int row) const { return kv_head * group + row % group; }

  // Where the row's head begins in an array [T, num_heads, head_dim] whose tokens are token_stride elements apart.
  template <int kHeadDim> __device__ __forceinline__ int64_t offset(int row, int64_t token_stride) const {
    return (first_token + row / group) * token_stride + head(row) * kHeadDim;
  }
};

// The first key that a row at `position` sees; it sees all from there to its own. A later position never sees further
// back.
__device__ __forceinline__ int first_visible_key(int position, int window, int chunk) {
  int first = 0;
  if (window > 0) first = max(first, position - window + 1);
  if (chunk > 0) first = max(first, position - position % chunk);
  return first;
}

// Keys [first, end).
struct KeyRange {
  int first, end;

  __device__ __forceinline__ bool contains(int key) const { return first <= key && key < end; }

  // Whether all keys of a tile are in it. Without a window or chunk (not kBounded) every range begins at key 0.
  template <bool kBounded> __device__ __forceinline__ bool contains(int first_key, int num_keys) const {
    return (!kBounded || first <= first_key) && first_key + num_keys <= end;
  }
};

// The end of the keys that a row sees: its own is the last. 0 for a row beyond the sequence's, which sees none.
__device__ __forceinline__ int end_of_visible_keys(const PackedRows& rows, int row) {
  return row < rows.count ? rows.position(row) + 1 : 0;
}

// The keys that a row sees, given where they end.
template <bool kBounded>
__device__ __forceinline__ KeyRange visible_keys(const AttentionArguments& arguments, int end) {
  return {kBounded ? first_visible_key(end - 1, arguments.window, arguments.chunk) : 0, end};
}

// The pages of one sequence and kv head. A tile of 16 keys lies in one block, so its 16 * head_dim elements are
// adjacent, and one entry of the block table addresses it.
template <class T, int kHeadDim> struct PagedSequence {
  const T* keys;    // of this kv head, in block 0
  const T* values;
  const int32_t* table;
  int32_t block_stride;
  int32_t block_size_log2;
  int32_t num_blocks, table_width;  // for bounds checks

  __device__ __forceinline__ PagedSequence(const AttentionArguments& arguments, int sequence, int kv_head)
      : keys(static_cast<const T*>(arguments.kv.keys) + kv_head * arguments.kv.head_stride),
        values(static_cast<const T*>(arguments.kv.values) + kv_head * arguments.kv.head_stride),
        table(arguments.block_tables + int64_t(sequence) * arguments.table_stride),
        block_stride(int32_t(arguments.kv.block_stride)), block_size_log2(arguments.kv.block_size_log2),
        num_blocks(arguments.kv.num_blocks), table_width(arguments.table_stride) {
    // 32 bits, so that an offset is one multiplication: blocks are less than 2^31 elements apart (checks.py).
    BOUNDS_CHECK(arguments.kv.block_stride == block_stride);
  }

  // The block that holds `key`.
  __device__ __forceinline__ int block_of(int key) const {
    const int entry = key >> block_size_log2;
    BOUNDS_CHECK(0 <= entry && entry < table_width);
    const int block = table[entry];
    BOUNDS_CHECK(0 <= block && block < num_blocks);
    return block;
  }

  // Where `key`, which is in `block`, begins, in elements from `keys` or `values`.
  __device__ __forceinline__ int64_t offset(int block, int key) const {
    const int in_block = key & ((1 << block_size_log2) - 1);
    return wide_product(block, block_stride) + in_block * kHeadDim;
  }
};

// Starts to copy packed rows first_row and on, gathered from the batch's tokens and heads, as one swizzled tile. Rows
// beyond the sequence's become zeros.
//
// Each warp copies the same number of rows. To find where one begins takes a division by the group: each lane does that
// for one row, and the lane that copies a chunk of it asks that one.
template <class T, int kHeadDim, int kRows, int kThreads>
__device__ __forceinline__ void start_query_copy(T* shared, const AttentionArguments& arguments,
                                                 const PackedRows& rows, int first_row) {
  constexpr int kChunks = kHeadDim / kChunkElements;
  constexpr int kWarpRows = kRows / (kThreads / kWarpSize);
  static_assert(kWarpRows <= kWarpSize, "a lane for each row");
  static_assert(kWarpRows * kChunks % kWarpSize == 0, "all lanes come to every shuffle");
  const int lane = threadIdx.x % kWarpSize;
  const int first_of_warp = threadIdx.x / kWarpSize * kWarpRows;
  int64_t own_offset = -1;  // there is no such row
  if (const int row = first_of_warp + lane % kWarpRows; first_row + row < rows.count) {
    own_offset = rows.offset<kHeadDim>(first_row + row, arguments.query_stride);
  }
  const T* const query = static_cast<const T*>(arguments.query);
#pragma unroll
  for (int index = lane; index < kWarpRows * kChunks; index += kWarpSize) {
    const int row = first_of_warp + index / kChunks;
    const int chunk = index % kChunks;
    const int64_t offset = __shfl_sync(kFullWarp, own_offset, index / kChunks);
    const bool exists = offset >= 0;
    const T* const source = query + (exists ? offset : 0) + chunk * kChunkElements;
    cp_async_16(shared + swizzled<kHeadDim>(row, chunk), source, exists);
  }
}
