// Tiles in shared memory: where an element lies, how a warp brings a tile there and reads it as fragments.
//
// A tile is some rows (keys, values or queries) of head_dim 16-bit elements. A row is cut into chunks of 16 bytes:
// what one lane of cp.async writes, and what one lane of ldmatrix reads. Shared memory serves 128 bytes at once if they
// come from 32 different banks, that is, 8 chunks from different eighths of a 128-byte line. ldmatrix wants the same
// chunk of 8 rows. Were rows stored plainly, these would all lie in the same eighth (at head_dim 96, in two of them).
// So the chunks of a row change places, row by row:
//
//   head_dim 64, 128, 256: chunk c of row r lies at c ^ (r % 8)      head_dim 96: at c ^ (r / 2 % 4)
//
//     row 0 | 0 1 2 3 4 5 6 7 |   a line is 8 chunks:                  row 0 | 0 1 2 3  4 5 6 7  8 9 a b |
//     row 1 | 1 0 3 2 5 4 7 6 |   each column holds                    row 1 | 0 1 2 3  4 5 6 7  8 9 a b |
//     row 2 | 2 3 0 1 6 7 4 5 |   chunk c once                         row 2 | 1 0 3 2  5 4 7 6  9 8 b a |
//     row 3 | 3 2 1 0 7 6 5 4 |                                        row 3 | 1 0 3 2  5 4 7 6  9 8 b a |
//      ...                                                              ...   rows are a line and a half apart
//
// After 8 rows the pattern repeats: a row and the one 8 further on differ by a constant offset.
#pragma once

#include "primitives.cuh"

constexpr int kChunkElements = 8;
constexpr int kSwizzleRows = 8;  // the pattern's period
constexpr int kMmaRows = 16;     // rows of A, of mma.m16n8k16
constexpr int kTileKeys = 16;    // its depth: keys of one product of weights and values. Divides every block size

// How many adjacent chunks change places among themselves.
template <int kHeadDim> constexpr int kSwizzleChunks = kHeadDim % 64 == 0 ? 8 : 4;

// Where chunk `chunk` of row `row` begins, in elements from the tile's first.
template <int kHeadDim> __device__ __forceinline__ constexpr int swizzled(int row, int chunk) {
  const int turn = (kSwizzleChunks<kHeadDim> == 8 ? row : row / 2) % kSwizzleChunks<kHeadDim>;
  return row * kHeadDim + (chunk ^ turn) * kChunkElements;
}

// Whether each chunk of 8 successive rows lies in 8 different eighths of a 128-byte line.
template <int kHeadDim> __device__ constexpr bool is_conflict_free() {
  for (int chunk = 0; chunk < kHeadDim / kChunkElements; ++chunk) {
    int eighths = 0;
    for (int row = 0; row < kSwizzleRows; ++row) {
      eighths |= 1 << swizzled<kHeadDim>(row, chunk) / kChunkElements % 8;
    }
    if (eighths != 0xff) return false;
  }
  return true;
}

// How one warp copies tiles of 16 rows that are adjacent in global memory, as the tokens of a block are.
//
// Copy i of a lane is chunk 32 * i + lane of the tile, so that a warp reads 512 adjacent bytes at a time. head_dim / 32
// copies are 8 rows, the swizzle's period: the other 8 rows have the same places, plus a constant.
template <class T, int kHeadDim> struct TileCopy {
  static constexpr int kChunks = kHeadDim / kChunkElements;
  static constexpr int kPeriod = kSwizzleRows * kChunks / kWarpSize;
  // Rows of one copy of the warp, where these are whole: then a lane keeps only the place of its first copy. Copy i
  // lies i * kWholeRows rows further on. The lane's row r of a copy is less than kWholeRows, a power of two, so that
  // r + i * kWholeRows = r ^ i * kWholeRows: the chunk may be turned by r first (places[0]) and by the rest later. Else
  // (head_dim 96) a lane keeps all its places in a period.
  static constexpr int kWholeRows = kWarpSize % kChunks == 0 ? kWarpSize / kChunks : 0;
  static_assert(kHeadDim % 32 == 0, "whole copies a period");
  static_assert(is_conflict_free<kHeadDim>(), "another swizzle is needed for this head_dim");

  int lane;
  int places[kWholeRows ? 1 : kPeriod];

  __device__ __forceinline__ TileCopy() : lane(kept(threadIdx.x % kWarpSize)) {
#pragma unroll
    for (int copy = 0; copy < (kWholeRows ? 1 : kPeriod); ++copy) {
      const int index = copy * kWarpSize + lane;
      places[copy] = kept(swizzled<kHeadDim>(index / kChunks, index % kChunks));
    }
  }

  // Where copy `copy` of a period lies, in elements.
  __device__ __forceinline__ int place(int copy) const {
    if constexpr (kWholeRows != 0) {
      const int row = copy * kWholeRows;
      return (places[0] ^ row * kChunkElements) + row * kHeadDim;
    } else {
      return places[copy];
    }
  }

  // Starts to copy one tile. Rows from num_rows on become zeros and are not read (all of them, where num_rows is 0 or
  // less): such a slot may hold NaN, which a weight of 0 would not silence.
  __device__ __forceinline__ void start(T* shared, const T* global, int num_rows) const {
    const int num_chunks = num_rows * kChunks - lane;
    const T* const source = global + lane * kChunkElements;
#pragma unroll
    for (int rows = 0; rows < kTileKeys; rows += kSwizzleRows) {
#pragma unroll
      for (int copy = 0; copy < kPeriod; ++copy) {
        const int index = rows * kChunks + copy * kWarpSize;
        cp_async_16(shared + rows * kHeadDim + place(copy), source + index * kChunkElements, index < num_chunks);
      }
    }
  }
};

// How one warp reads 16 x 16 fragments of tiles, for mma_m16n8k16: 16 rows down, two chunks across, as four 8 x 8
// matrices. Lanes 0-7 name the rows of the matrix for register 0, lanes 8-15 of that for register 1, and so on. The
// numbers are registers; the two of a B operand follow each other:
//
//             queries, as A      keys, as B: b0 b1             values, as B, transposed: b0 b1
//                c   c + 1          c   c + 1                     c   c + 1
//   rows 0-7   | 0 |   2   |      | 0 |   1   |  keys 0-7       | 0 |   2   |   b0    0 1 of dims of chunk c
//   rows 8-15  | 1 |   3   |      | 2 |   3   |  keys 8-15      | 1 |   3   |   b1    2 3 of the next
template <class T, int kHeadDim> struct FragmentReader {
  // After so many steps of two chunks the swizzle repeats: a lane keeps as many places, and adds constants to them.
  static constexpr int kPeriod = kSwizzleChunks<kHeadDim> / 2;

  int rows_first[kPeriod];    // registers 0 and 1 are above each other
  int chunks_first[kPeriod];  // they are beside each other

  __device__ __forceinline__ FragmentReader() {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int step = 0; step < kPeriod; ++step) {
      rows_first[step] = kept(swizzled<kHeadDim>(lane % 16, step * 2 + lane / 16));
      chunks_first[step] = kept(swizzled<kHeadDim>(lane % 8 + lane / 16 * 8, step * 2 + lane / 8 % 2));
    }
  }

  // Columns 16 * step to 16 * step + 15 of 16 rows.
  __device__ __forceinline__ void read_queries(uint32_t (&registers)[4], const T* tile, int step) const {
    ldmatrix_x4(registers, tile + rows_first[step % kPeriod] + constant_part(step));
  }

  __device__ __forceinline__ void read_keys(uint32_t (&registers)[4], const T* tile, int step) const {
    ldmatrix_x4(registers, tile + chunks_first[step % kPeriod] + constant_part(step));
  }

  // Of any numbers of 16 bits.
  template <class Value>
  __device__ __forceinline__ void read_values(uint32_t (&registers)[4], const Value* tile, int step) const {
    ldmatrix_x4_transposed(registers, tile + rows_first[step % kPeriod] + constant_part(step));
  }

 private:
  __device__ __forceinline__ static constexpr int constant_part(int step) {
    return step / kPeriod * kSwizzleChunks<kHeadDim> * kChunkElements;
  }
};
