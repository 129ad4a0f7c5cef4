// One kernel for each primitive of primitives.cuh, so that it can be held against its definition.
#include "primitives.cuh"

struct ProbeArguments {
  const void* input;
  const void* extra;
  void* output;
  int32_t count;
};

__device__ __forceinline__ int global_thread() { return blockIdx.x * blockDim.x + threadIdx.x; }

template <class T> __global__ void probe_to_float(ProbeArguments arguments) {
  const int i = global_thread();
  if (i >= arguments.count) return;
  static_cast<float*>(arguments.output)[i] = to_float(static_cast<const T*>(arguments.input)[i]);
}

template <class T> __global__ void probe_from_float(ProbeArguments arguments) {
  const int i = global_thread();
  if (i >= arguments.count) return;
  static_cast<T*>(arguments.output)[i] = from_float<T>(static_cast<const float*>(arguments.input)[i]);
}

template <class T> __global__ void probe_pack(ProbeArguments arguments) {
  const int i = global_thread();
  if (i >= arguments.count) return;
  const float* pair = static_cast<const float*>(arguments.input) + 2 * i;
  static_cast<uint32_t*>(arguments.output)[i] = pack<T>(pair[0], pair[1]);
}

// input: pairs of factors.
__global__ void probe_wide_product(ProbeArguments arguments) {
  const int i = global_thread();
  if (i >= arguments.count) return;
  const int32_t* pair = static_cast<const int32_t*>(arguments.input) + 2 * i;
  static_cast<int64_t*>(arguments.output)[i] = wide_product(kept(pair)[0], kept(pair[1]));
}

__global__ void probe_exp2_approximate(ProbeArguments arguments) {
  const int i = global_thread();
  if (i >= arguments.count) return;
  static_cast<float*>(arguments.output)[i] = exp2_approximate(static_cast<const float*>(arguments.input)[i]);
}

__global__ void probe_tanh_approximate(ProbeArguments arguments) {
  const int i = global_thread();
  if (i >= arguments.count) return;
  static_cast<float*>(arguments.output)[i] = tanh_approximate(static_cast<const float*>(arguments.input)[i]);
}

// input: [products, 32 lanes, a0..a3 b0 b1]. extra, output: [products, 32 lanes, d0..d3]. One product a warp.
template <class T> __global__ void probe_mma(ProbeArguments arguments) {
  const int i = global_thread();
  if (i / kWarpSize >= arguments.count) return;
  const uint32_t* own = static_cast<const uint32_t*>(arguments.input) + 6 * i;
  const float* before = static_cast<const float*>(arguments.extra) + 4 * i;
  const uint32_t a[4] = {own[0], own[1], own[2], own[3]};
  float d[4] = {before[0], before[1], before[2], before[3]};
  mma_m16n8k16<T>(d, a, own[4], own[5]);
  float* after = static_cast<float*>(arguments.output) + 4 * i;
  for (int j = 0; j < 4; ++j) after[j] = d[j];
}

// input: [32 rows, 16 bytes]. extra: [32 lanes], the row that each lane names. output: [32 lanes, 4 registers].
template <bool kTransposed> __global__ void probe_ldmatrix(ProbeArguments arguments) {
  DYNAMIC_SHARED(memory, 32 * 16);
  uint4* rows = reinterpret_cast<uint4*>(memory);
  const int lane = threadIdx.x;
  rows[lane] = static_cast<const uint4*>(arguments.input)[lane];
  __syncwarp();
  const uint4* row = rows + static_cast<const int32_t*>(arguments.extra)[lane];
  uint32_t registers[4];
  if (kTransposed) {
    ldmatrix_x4_transposed(registers, row);
  } else {
    ldmatrix_x4(registers, row);
  }
  for (int j = 0; j < 4; ++j) static_cast<uint32_t*>(arguments.output)[4 * lane + j] = registers[j];
}

// input: [groups, threads, 16 bytes], a group of copies after another. extra: [groups, threads], whether each is
// valid. output: the same as input, as the next thread of the block finds it in shared memory.
template <int kGroups> __global__ void probe_cp_async(ProbeArguments arguments) {
  const int threads = blockDim.x;
  DYNAMIC_SHARED(memory, kGroups * threads * 16);
  uint4* shared = reinterpret_cast<uint4*>(memory);
  const auto* valid = static_cast<const int32_t*>(arguments.extra);
  const int thread = threadIdx.x;
  for (int group = 0; group < kGroups; ++group) {
    const int i = group * threads + thread;
    // Nothing is read where the copy is not valid: then the address leads nowhere.
    const uint4* from = valid[i] ? static_cast<const uint4*>(arguments.input) + i : nullptr;
    cp_async_16(shared + i, from, valid[i]);
    cp_async_commit();
  }
  const auto hand_over = [&](int group) {
    const int i = group * threads + (thread + 1) % threads;
    static_cast<uint4*>(arguments.output)[i] = shared[i];
  };
  cp_async_wait<1>();
  __syncthreads();
  for (int group = 0; group < kGroups - 1; ++group) hand_over(group);
  cp_async_wait<0>();
  __syncthreads();
  hand_over(kGroups - 1);
}
