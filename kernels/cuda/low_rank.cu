// What adapters add to a product: output += B (A row), for each row of an adapter (Hu et al. 2021, arXiv:2106.09685).
//
// Two launches for all adapters of a step, whatever their ranks (Chen et al. 2023, "Punica", arXiv:2310.18547: segments
// of rows, one an adapter, in grouped products). A segment is cut into pieces of 16 rows, the height of one
// mma.m16n8k16; a piece of one row costs as much as one of sixteen, since what counts is that A and B are read.
//
//   low_rank_shrink   hidden = A row              rounded to T
//     grid       (pieces, tiles of 16 ranks)      block   4 warps, which share out the inputs; their sums are added in order
//     registers  56                               shared  4 KiB, for those sums
//   low_rank_expand   output += B hidden          in float32, rounded to T once
//     grid       (pieces, 128 outputs, parts)     block   4 warps of 32 outputs
//     registers  64
//
// No operand goes through shared memory. The sum over k may be in any order, if it is the same for both operands: so a
// lane takes eight neighbours of a row by one access, and two of these products take them as columns 4 apart,
//
//   columns of 32       lane % 4:  0 0 0 0 0 0 0 0 | 1 1 1 1 1 1 1 1 | 2 2 ..
//   of the product       step 0:   t t+1 t+8 t+9              step 1:         t t+1 t+8 t+9      (t = lane % 4 * 2)
//
// In the same way four products share out 32 outputs, so that a lane ends with eight neighbours of a row of the output.
// Ranks of a part are filled up to a multiple of 8 with zeros. A row's bits depend on the row and its adapter alone.
#include "arguments.cuh"
#include "octet.cuh"

constexpr int kPieceRows = 16;   // row_grids.PIECE_ROWS
constexpr int kRankTile = 16;    // row_grids.RANK_TILE
constexpr int kDepth = 32;       // columns of two products
constexpr int kOutputs = 32;     // of a warp
constexpr int kLowRankWarps = kRowThreads / kWarpSize;

__device__ __forceinline__ uint32_t word(const uint4& octet, int index) {
  return index == 0 ? octet.x : index == 1 ? octet.y : index == 2 ? octet.z : octet.w;
}

// sums += rows (columns)^T: 16 rows, low and high being rows g and g + 8, and the eight columns of which this lane has
// number g = lane / 4; 32 numbers of each.
template <class T>
__device__ __forceinline__ void multiply_octets(float (&sums)[4], const uint4& low, const uint4& high, const uint4& column) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const uint32_t rows[4] = {word(low, 2 * step), word(high, 2 * step), word(low, 2 * step + 1), word(high, 2 * step + 1)};
    mma_m16n8k16<T>(sums, rows, word(column, 2 * step), word(column, 2 * step + 1));
  }
}

// The factors of a piece's adapter. They come with the launch: no table of pointers has to be sent.
__device__ __forceinline__ const LowRankFactors& factors_of(const LowRankArguments& args, const LowRankPiece& piece) {
  const int index = piece.adapter - args.first_adapter;
  BOUNDS_CHECK(index >= 0 && index < kMostAdapters);
  return args.factors[index];
}

// The row of the step that is `index` of the piece.
__device__ __forceinline__ int64_t row_of(const LowRankArguments& args, const LowRankPiece& piece, int index) {
  const int row = args.row_ids[piece.first + index];
  BOUNDS_CHECK(row >= 0 && row < args.num_rows);
  return row;
}

template <class T>
__global__ void __launch_bounds__(kRowThreads) low_rank_shrink(const LowRankArguments args) {
  __shared__ float sums_of[kLowRankWarps][kPieceRows][kRankTile];
  const LowRankPiece piece = args.pieces[blockIdx.x];
  const LowRankFactors& factors = factors_of(args, piece);
  const int first_rank = blockIdx.y * kRankTile;
  const int rank = factors.ranks[0] + factors.ranks[1] + factors.ranks[2];
  if (first_rank >= rank) return;

  const int warp = threadIdx.x / kWarpSize, group = threadIdx.x % kWarpSize / 4, octet = threadIdx.x % 4 * kOctet;
  const int size = args.in_features;
  const T* rows[2];
  const T* columns[2];
  bool has_row[2], has_column[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int index = group + half * 8, number = first_rank + group + half * 8;
    has_row[half] = index < piece.count;
    has_column[half] = number < rank;
    rows[half] = static_cast<const T*>(args.rows) + (has_row[half] ? row_of(args, piece, index) * args.row_stride : 0);
    columns[half] = static_cast<const T*>(factors.a) + (has_column[half] ? int64_t(number) * size : 0);
  }

  float sums[2][4] = {};
#pragma unroll 2
  for (int k = warp * kDepth + octet; k - octet < size; k += kLowRankWarps * kDepth) {
    const uint4 low = load_octet(rows[0] + k, has_row[0] ? size - k : 0);
    const uint4 high = load_octet(rows[1] + k, has_row[1] ? size - k : 0);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      multiply_octets<T>(sums[half], low, high, load_octet(columns[half] + k, has_column[half] ? size - k : 0));
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sums_of[warp][group + i / 2 * 8][half * 8 + threadIdx.x % 4 * 2 + i % 2] = sums[half][i];
  }
  __syncthreads();
  const int row = threadIdx.x / (kRankTile / 2), column = threadIdx.x % (kRankTile / 2) * 2;
  if (row >= piece.count) return;
  float low = 0, high = 0;
#pragma unroll
  for (int of = 0; of < kLowRankWarps; ++of) {
    low += sums_of[of][row][column];
    high += sums_of[of][row][column + 1];
  }
  T* hidden = static_cast<T*>(args.hidden) + int64_t(piece.first + row) * args.hidden_stride + first_rank + column;
  *reinterpret_cast<uint32_t*>(hidden) = pack<T>(low, high);
}

template <class T>
__global__ void __launch_bounds__(kRowThreads) low_rank_expand(const LowRankArguments args) {
  const LowRankPiece piece = args.pieces[blockIdx.x];
  const LowRankFactors& factors = factors_of(args, piece);
  const int part = blockIdx.z, rank = factors.ranks[part];
  const int first_rank = (part > 0 ? factors.ranks[0] : 0) + (part > 1 ? factors.ranks[1] : 0);
  const int size = args.starts[part + 1] - args.starts[part];
  const int warp = threadIdx.x / kWarpSize, group = threadIdx.x % kWarpSize / 4, octet = threadIdx.x % 4 * kOctet;
  const int first = (int(blockIdx.y) * kLowRankWarps + warp) * kOutputs;
  if (rank == 0 || first >= size) return;

  const T* hidden = static_cast<const T*>(args.hidden) + int64_t(piece.first + group) * args.hidden_stride + first_rank;
  const bool has_low = group < piece.count, has_high = group + 8 < piece.count;
  float sums[4][4] = {};
#pragma unroll 1
  for (int k = octet; k - octet < rank; k += kDepth) {
    const uint4 low = load_octet(hidden + k, has_low ? rank - k : 0);
    const uint4 high = load_octet(hidden + int64_t(8) * args.hidden_stride + k, has_high ? rank - k : 0);
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      const int output = first + group / 2 * kOctet + tile * 2 + group % 2;
      const T* b = static_cast<const T*>(factors.b[part]) + int64_t(output) * rank + k;
      multiply_octets<T>(sums[tile], low, high, load_octet(b, output < size ? rank - k : 0));
    }
  }

  const int count = size - first - octet;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int index = group + half * 8;
    if (index >= piece.count || count <= 0) continue;
    T* to = static_cast<T*>(args.output) + row_of(args, piece, index) * args.output_stride + args.starts[part] + first + octet;
    float elements[kOctet];
    unpack_octet<T>(elements, load_octet(to, count));
#pragma unroll
    for (int j = 0; j < kOctet; ++j) elements[j] += sums[j / 2][half * 2 + j % 2];
    store_octet(to, pack_octet<T>(elements), count);
  }
}
