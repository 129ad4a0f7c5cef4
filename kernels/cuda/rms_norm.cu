// RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), with the residual sum on the way where there is one:
//
//   summed = residual + hidden                             rounded to T
//   normed = summed / sqrt(mean(summed^2) + epsilon)       in float32, rounded to T
//            * weight                                      rounded to T again
//
//   grid       (rows, or a quarter where rows are short)   block   128 threads: a row, or a short row a warp
//   shared     one float a warp                            registers  56
//   access     octets (16-byte accesses), neighbours by neighbouring threads
//
//   octet of a row    0   1  ..  127 | 128 129 .. 255 | ..       thread of a block: octet % 128
//                     `----------- kAtOnce of these at a time: all their loads are on their way together
//
// Two passes: the second reads again what this very thread has read or written in the first, from the cache
// (a row of 4096 elements is 8 KiB). Registers would hold rows up to one size only.
//
// Which thread adds which elements, and in which order the sums meet, depends on `size` alone: a row has the
// same bits in any batch, and from any address.
#include "arguments.cuh"
#include "octet.cuh"

constexpr int kRowWarps = kRowThreads / kWarpSize;

// Up to here a warp has an octet a lane for the whole row (the norms of query and key heads): four rows a
// block keep all warps busy, and need no barrier. row_grids.WARP_ROW_SIZE.
constexpr int kWarpRowSize = kWarpSize * kOctet;

// The sum over a warp, in every lane.
__device__ __forceinline__ float warp_sum(float value) {
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2)
    value += __shfl_xor_sync(kFullWarp, value, distance);
  return value;
}

// The sum over the kThreads of a row, in every one of them.
template <int kThreads> __device__ __forceinline__ float row_sum(float value) {
  value = warp_sum(value);
  if constexpr (kThreads == kWarpSize) {
    return value;
  } else {
    __shared__ float of_warp[kRowWarps];
    if (threadIdx.x % kWarpSize == 0) of_warp[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    float sum = 0;
    for (int warp = 0; warp < kRowWarps; warp++) sum += of_warp[warp];
    return sum;
  }
}

// The octets that a thread takes of a row at a time, kThreads octets apart, beginning at element `start`.
//
// kWide: all rows consist of whole octets at multiples of 16 bytes. Then a load is one instruction without a
// branch, and the loads of four octets follow each other: a row of 4096 elements costs one latency of memory.
template <class T, int kThreads, bool kWide> struct RowOctets {
  static constexpr int kAtOnce = kWide && kThreads > kWarpSize ? 4 : 1;
  static constexpr int kStride = kThreads * kOctet;
  static constexpr int kStep = kStride * kAtOnce;

  uint4 octets[kAtOnce];

  __device__ __forceinline__ void load(const T* row, int start, int size) {
#pragma unroll
    for (int n = 0; n < kAtOnce; n++) {
      const int i = start + n * kStride;
      if constexpr (kWide)
        octets[n] = i < size ? octet_at(row + i) : uint4{};
      else
        octets[n] = load_octet(row + i, size - i);
    }
  }

  __device__ __forceinline__ void store(T* row, int start, int size) const {
#pragma unroll
    for (int n = 0; n < kAtOnce; n++) {
      const int i = start + n * kStride;
      if constexpr (!kWide)
        store_octet(row + i, octets[n], size - i);
      else if (i < size)
        octet_at(row + i) = octets[n];
    }
  }
};

// Row `row`, by kThreads threads of which this is `thread`.
template <class T, int kThreads, bool kWide>
__device__ __forceinline__ void norm_row(const RmsNormArguments& args, int row, int thread) {
  using Octets = RowOctets<T, kThreads, kWide>;
  const int64_t start = int64_t(row) * args.size;  // of this row in the contiguous tensors
  const T* hidden = static_cast<const T*>(args.hidden) + row / args.inner * args.outer_stride +
                    row % args.inner * args.inner_stride;
  const bool has_residual = args.residual != nullptr;
  const T* residual = has_residual ? static_cast<const T*>(args.residual) + start : nullptr;
  T* summed = has_residual ? static_cast<T*>(args.summed) + start : nullptr;

  float squares = 0;
#pragma unroll 1
  for (int i = thread * kOctet; i < args.size; i += Octets::kStep) {
    Octets taken, added;
    taken.load(hidden, i, args.size);
    if (has_residual) added.load(residual, i, args.size);
#pragma unroll
    for (int n = 0; n < Octets::kAtOnce; n++) {
      float x[kOctet], y[kOctet];
      unpack_octet<T>(x, taken.octets[n]);
      if (has_residual) {
        unpack_octet<T>(y, added.octets[n]);
        for (int j = 0; j < kOctet; j++) x[j] = rounded<T>(y[j] + x[j]);
        taken.octets[n] = pack_octet<T>(x);
      }
      for (int j = 0; j < kOctet; j++) squares = fmaf(x[j], x[j], squares);
    }
    if (has_residual) taken.store(summed, i, args.size);
  }

  const float mean = row_sum<kThreads>(squares) / args.size;
  const float scale = 1.0f / sqrtf(mean + args.epsilon);
  const T* again = has_residual ? summed : hidden;
  const T* weight = static_cast<const T*>(args.weight);
  T* normed = static_cast<T*>(args.normed) + start;
#pragma unroll 1
  for (int i = thread * kOctet; i < args.size; i += Octets::kStep) {
    Octets taken, weights;
    taken.load(again, i, args.size);
    weights.load(weight, i, args.size);
#pragma unroll
    for (int n = 0; n < Octets::kAtOnce; n++) {
      float x[kOctet], w[kOctet];
      unpack_octet<T>(x, taken.octets[n]);
      unpack_octet<T>(w, weights.octets[n]);
      for (int j = 0; j < kOctet; j++) x[j] = w[j] * rounded<T>(x[j] * scale);
      taken.octets[n] = pack_octet<T>(x);
    }
    taken.store(normed, i, args.size);
  }
}

// Whether every row of every tensor consists of whole octets at multiples of 16 bytes.
__device__ __forceinline__ bool is_wide(const RmsNormArguments& args) {
  const auto address = [](const void* pointer) { return uint64_t(pointer); };  // 0 for null: divisible
  const uint64_t addresses = address(args.hidden) | address(args.residual) | address(args.weight) |
                             address(args.normed) | address(args.summed);
  return addresses % 16 == 0 && args.size % kOctet == 0 && args.outer_stride % kOctet == 0 &&
         args.inner_stride % kOctet == 0;
}

template <class T, bool kWide> __device__ __forceinline__ void norm_rows(const RmsNormArguments& args) {
  if (args.size > kWarpRowSize) {
    norm_row<T, kRowThreads, kWide>(args, blockIdx.x, threadIdx.x);
    return;
  }
  const int64_t row = int64_t(blockIdx.x) * kRowWarps + threadIdx.x / kWarpSize;
  if (row < int64_t(args.outer) * args.inner)
    norm_row<T, kWarpSize, kWide>(args, row, threadIdx.x % kWarpSize);
}

template <class T> __global__ void __launch_bounds__(kRowThreads) rms_norm(const RmsNormArguments args) {
  if (is_wide(args))
    norm_rows<T, true>(args);
  else
    norm_rows<T, false>(args);
}
