// What a block of few rows begins and ends with: its queries, and what its warps merge. Of paged_decode and coded_decode.
#pragma once

#include "attention_tile.cuh"

// Up to head_dim 128 the queries stay in registers, as fragments. 256 dims of 16 rows take 64 registers a lane beside
// the output's 128, too many: there each step reads its fragment from shared memory.
template <int kHeadDim> constexpr bool kQueryInShared = kHeadDim > 128;

// Floats behind each row of what the warps merge. Half a warp stores 32 bytes of each of 4 rows at once. Rows of a
// multiple of 128 bytes would all begin in the same bank; with 32 bytes more, each begins a quarter of the banks on.
constexpr int kMergePadding = 8;

// What the warps leave to be merged: their parts of each row's output, anchor and sum. A warp that saw no key leaves
// kNegativeInfinity and 0.
template <int kHeadDim, int kWarps> struct WarpResults {
  float outputs[kWarps][kMmaRows][kHeadDim + kMergePadding];
  float2 sums[kWarps][kMmaRows];
};

// The index of packed row `row` of a partial result, in partial_sums; times head_dim, in partial_outputs.
__device__ __forceinline__ int64_t partial_row(const AttentionArguments& arguments, int partial, int kv_head, int row) {
  return (int64_t(partial) * arguments.num_kv_heads + kv_head) * kMmaRows + row;
}

// The packed rows as operand A, straight from global memory: each is read once. Rows beyond the last are zeros.
template <class T, int kHeadDim>
__device__ __forceinline__ void load_query(uint32_t (&query)[kHeadDim / 16][4], const AttentionArguments& arguments,
                                           const PackedRows& rows) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int row = row_of_lane(half);
    const bool exists = row < rows.count;
    const int64_t offset = exists ? rows.offset<kHeadDim>(row, arguments.query_stride) : 0;
    const T* const source = static_cast<const T*>(arguments.query) + offset + column_of_lane();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      query[step][half] = exists ? *reinterpret_cast<const uint32_t*>(source + step * 16) : 0;
      query[step][half + 2] = exists ? *reinterpret_cast<const uint32_t*>(source + step * 16 + 8) : 0;
    }
  }
}

// Adds the result of some of a row's keys to that of others. Sums are (anchor, sum), values two dims of the output;
// the anchor in `sums` is the highest of all parts.
__device__ __forceinline__ void add_part(float2& sums, float2& values, float2 part_sums, float2 part_values) {
  const float factor = exp2_approximate(part_sums.x - sums.x);
  sums.y += factor * part_sums.y;
  values.x += factor * part_values.x;
  values.y += factor * part_values.y;
}

// Two neighbouring dims of a row's result. sums: anchor and sum; values: not yet divided by the sum.
template <class T, int kHeadDim>
__device__ __forceinline__ void store_output(const AttentionArguments& arguments, const PackedRows& rows, int row,
                                             int dim, float2 sums, float2 values) {
  const float factor = normalization(sums.x, sums.y, arguments.sinks, rows.head(row));
  T* const output = static_cast<T*>(arguments.output) + rows.offset<kHeadDim>(row, rows.num_heads * kHeadDim) + dim;
  *reinterpret_cast<uint32_t*>(output) = pack<T>(values.x * factor, values.y * factor);
}

// Leaves this warp's sums for the merge, row by row.
template <int kHeadDim, int kWarps>
__device__ __forceinline__ void leave_results(WarpResults<kHeadDim, kWarps>& results, const RowSums<kHeadDim, 1>& sums,
                                              int warp, int num_rows) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int row = row_of_lane(half);
    if (row < num_rows) {
#pragma unroll
      for (int dims = 0; dims < kHeadDim / 8; ++dims) {
        const float2 pair = make_float2(sums.output[0][dims][half * 2], sums.output[0][dims][half * 2 + 1]);
        *reinterpret_cast<float2*>(&results.outputs[warp][row][dims * 8 + column_of_lane()]) = pair;
      }
      if (column_of_lane() == 0) results.sums[warp][row] = make_float2(sums.anchor[0][half], sums.sum[0][half]);
    }
  }
}

// Adds up what the warps left, warp by warp, and stores it: as the output, or as partial result `partial`.
template <class T, int kHeadDim, int kWarps>
__device__ __forceinline__ void merge_results(const WarpResults<kHeadDim, kWarps>& results,
                                              const AttentionArguments& arguments, const PackedRows& rows,
                                              int partial) {
  constexpr int kPairs = kHeadDim / 2;  // of neighbouring dims
  for (int index = threadIdx.x; index < rows.count * kPairs; index += kWarps * kWarpSize) {
    const int row = index / kPairs;
    const int dim = index % kPairs * 2;
    float anchor = kNegativeInfinity;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) anchor = fmaxf(anchor, results.sums[warp][row].x);
    float2 sums = {anchor, 0.0f};
    float2 values = {0.0f, 0.0f};
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      add_part(sums, values, results.sums[warp][row],
               *reinterpret_cast<const float2*>(&results.outputs[warp][row][dim]));
    }
    if (partial < 0) {
      store_output<T, kHeadDim>(arguments, rows, row, dim, sums, values);
    } else {
      const int64_t place = partial_row(arguments, partial, rows.kv_head, row);
      *reinterpret_cast<float2*>(arguments.partial_outputs + place * kHeadDim + dim) = values;
      if (dim == 0) arguments.partial_sums[place] = sums;
    }
  }
}
