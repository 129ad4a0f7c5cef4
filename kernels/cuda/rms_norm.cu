// RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), with the residual sum on the way where there is one:
//
//   summed = hidden + residual                             rounded to T
//   normed = summed / sqrt(mean(summed^2) + epsilon)       in float32, rounded to T
//            * weight                                      rounded to T again
//
//   grid       (rows, or a quarter where rows are short)   block   128 threads: one row, or a short one a warp
//   shared     one float a warp                            registers  38
//   access     octets (16-byte accesses), neighbours by neighbouring threads
//
// Two passes: the second reads again what this very thread has read or written in the first, from the cache
// (a row of 4096 elements is 8 KiB). Registers would hold rows up to one size only, and fewer rows at a time.
//
// Which thread adds which elements, and in which order the sums meet, depends on `size` alone: a row has the
// same bits in any batch, and from any address.
#include "arguments.cuh"
#include "octet.cuh"

constexpr int kRowWarps = kRowThreads / kWarpSize;

// Up to here a warp has an octet a lane for the whole row (the norms of query and key heads): four rows a block
// keep all warps busy, and need no barrier. row_grids.py has it too.
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

// `thread` is one of the kThreads of `row`.
template <class T, int kThreads>
__device__ __forceinline__ void norm_row(const RmsNormArguments& args, int row, int thread) {
  const int64_t start = int64_t(row) * args.size;  // of this row in the contiguous tensors
  const T* hidden = static_cast<const T*>(args.hidden) + row / args.inner * args.outer_stride +
                    row % args.inner * args.inner_stride;
  const T* summed = hidden;
  float squares = 0;
  if (args.residual) {
    const T* residual = static_cast<const T*>(args.residual) + start;
    T* sum = static_cast<T*>(args.summed) + start;
    for (int i = thread * kOctet; i < args.size; i += kThreads * kOctet) {
      const int count = args.size - i;
      float x[kOctet], y[kOctet];
      unpack_octet<T>(x, load_octet(hidden + i, count));
      unpack_octet<T>(y, load_octet(residual + i, count));
      for (int j = 0; j < kOctet; j++) {
        x[j] = rounded<T>(y[j] + x[j]);
        squares = fmaf(x[j], x[j], squares);
      }
      store_octet(sum + i, pack_octet<T>(x), count);
    }
    summed = sum;
  } else {
    for (int i = thread * kOctet; i < args.size; i += kThreads * kOctet) {
      float x[kOctet];
      unpack_octet<T>(x, load_octet(hidden + i, args.size - i));
      for (int j = 0; j < kOctet; j++) squares = fmaf(x[j], x[j], squares);
    }
  }

  const float mean = row_sum<kThreads>(squares) / args.size;
  const float scale = 1.0f / sqrtf(mean + args.epsilon);
  const T* weight = static_cast<const T*>(args.weight);
  T* normed = static_cast<T*>(args.normed) + start;
  for (int i = thread * kOctet; i < args.size; i += kThreads * kOctet) {
    const int count = args.size - i;
    float x[kOctet], w[kOctet];
    unpack_octet<T>(x, load_octet(summed + i, count));
    unpack_octet<T>(w, load_octet(weight + i, count));
    for (int j = 0; j < kOctet; j++) x[j] = w[j] * rounded<T>(x[j] * scale);
    store_octet(normed + i, pack_octet<T>(x), count);
  }
}

template <class T> __global__ void __launch_bounds__(kRowThreads) rms_norm(const RmsNormArguments args) {
  if (args.size > kWarpRowSize) {
    norm_row<T, kRowThreads>(args, blockIdx.x, threadIdx.x);
    return;
  }
  const int64_t row = int64_t(blockIdx.x) * kRowWarps + threadIdx.x / kWarpSize;
  if (row < int64_t(args.outer) * args.inner) norm_row<T, kWarpSize>(args, row, threadIdx.x % kWarpSize);
}
