// The bytes of a block, shared out among threads: for the kernels that move whole blocks.
//
//   block    | group 0                        | group 1 ...     of kColumns * kRowThreads columns
//            | 0 1 2 .. 127 | 0 1 .. 127 | .. |                 columns of 16 bytes, by the owner's number
//
// A thread owns kColumns columns, kRowThreads apart, so that a warp's access is 512 bytes in a row, and has
// kColumns loads on their way at a time: 64 bytes a thread cover the latency of HBM from a third of the
// threads that an SM can hold.
#pragma once

#include "arguments.cuh"

constexpr int kColumns = 4;       // row_grids.COLUMNS
constexpr int kColumnBytes = 16;

// This thread's columns of one block's bytes. Those beyond the block's end are neither read nor written.
class Columns {
 public:
  __device__ __forceinline__ explicit Columns(int64_t block_bytes)
      : block_columns_(block_bytes / kColumnBytes),
        first_(int64_t(blockIdx.x) * kRowThreads * kColumns + threadIdx.x) {}

  // `blocks` are adjacent, beginning at number 0.
  __device__ __forceinline__ void load(uint4 (&bytes)[kColumns], const void* blocks, int32_t block) const {
    const uint4* from = static_cast<const uint4*>(blocks) + block * block_columns_ + first_;
#pragma unroll
    for (int i = 0; i < kColumns; i++)
      if (is_inside(i)) bytes[i] = from[i * kRowThreads];
  }

  __device__ __forceinline__ void store(void* blocks, int32_t block, const uint4 (&bytes)[kColumns]) const {
    uint4* to = static_cast<uint4*>(blocks) + block * block_columns_ + first_;
#pragma unroll
    for (int i = 0; i < kColumns; i++)
      if (is_inside(i)) to[i * kRowThreads] = bytes[i];
  }

 private:
  __device__ __forceinline__ bool is_inside(int i) const { return first_ + i * kRowThreads < block_columns_; }

  int64_t block_columns_;
  int64_t first_;
};
