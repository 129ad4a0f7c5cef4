// Small kernels, most with a bug, that show what the emulator makes of it. The text of a comment "// at: ..." names
// its line for the tests.
#include "primitives.cuh"

struct EmulatorArguments {
  float* output;
  const float* input;
  int32_t* counter;
  int32_t count;
};

// output[i] = input of the thread after next warp's, through shared memory.
template <bool kBarrier> __global__ void rotate(EmulatorArguments arguments) {
  DYNAMIC_SHARED(memory, 128 * 4);
  float* values = reinterpret_cast<float*>(memory);
  values[threadIdx.x] = arguments.input[threadIdx.x];  // at: rotated write
  if (kBarrier) __syncthreads();
  arguments.output[threadIdx.x] = values[(threadIdx.x + 32) % 128];  // at: rotated read
}

// The same within the warp.
template <bool kBarrier> __global__ void rotate_lanes(EmulatorArguments arguments) {
  __shared__ float values[128];
  values[threadIdx.x] = arguments.input[threadIdx.x];  // at: lane write
  if (kBarrier) __syncwarp();
  arguments.output[threadIdx.x] = values[threadIdx.x ^ 1];  // at: lane read
}

// A vote makes lanes meet, but it does not order their accesses to memory.
__global__ void votes_for_a_barrier(EmulatorArguments arguments) {
  __shared__ float values[128];
  values[threadIdx.x] = arguments.input[threadIdx.x];  // at: vote write
  __ballot_sync(kFullWarp, true);
  arguments.output[threadIdx.x] = values[threadIdx.x ^ 1];  // at: vote read
}

// Two threads write one value: the same, so that no result shows it.
template <bool kApart> __global__ void overlap(EmulatorArguments arguments) {
  __shared__ float values[256];
  values[threadIdx.x / (kApart ? 1 : 2)] = 1.0f;  // at: overlapping write
  __syncthreads();
  arguments.output[threadIdx.x] = values[0];
}

// Two groups of copies, of which all but kPending are waited for: output = both, elementwise.
template <int kPending> __global__ void wait_for(EmulatorArguments arguments) {
  DYNAMIC_SHARED(memory, 2 * 32 * 16);
  float* shared = reinterpret_cast<float*>(memory) + threadIdx.x * 4;
  for (int group = 0; group < 2; ++group) {
    const int first = group * 128;
    cp_async_16(shared + first, arguments.input + first + threadIdx.x * 4, true);  // at: copy
    cp_async_commit();
  }
  cp_async_wait<kPending>();
  for (int i = 0; i < 4; ++i) arguments.output[threadIdx.x * 4 + i] = shared[i] + shared[128 + i];  // at: copied sum
}

// A block may end before its copies: they touch memory that is read no more.
__global__ void leaves_a_copy(EmulatorArguments arguments) {
  DYNAMIC_SHARED(memory, 128 * 16);
  unsigned char* own = memory + threadIdx.x * 16;
  cp_async_16(own, arguments.input + threadIdx.x * 4, true);
  cp_async_commit();
  cp_async_wait<0>();
  arguments.output[threadIdx.x] = *reinterpret_cast<const float*>(own);
  cp_async_16(own, arguments.input, true);
}

// Each round one warp's copies fill a buffer that all warps read. Without the second barrier a fast warp refills it
// while slow ones still read.
template <bool kBarrier> __global__ void refill(EmulatorArguments arguments) {
  DYNAMIC_SHARED(memory, 32 * 16);
  float* shared = reinterpret_cast<float*>(memory);
  float sum = 0.0f;
  for (int round = 0; round < 3; ++round) {
    const float* from = arguments.input + round * 128 + threadIdx.x * 4;
    if (threadIdx.x < 32) cp_async_16(shared + threadIdx.x * 4, from, true);  // at: refill
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    sum += shared[threadIdx.x];  // at: sum
    if (kBarrier) __syncthreads();
  }
  arguments.output[threadIdx.x] = sum;
}

__global__ void divergent_barrier(EmulatorArguments) {
  if (threadIdx.x < 64) {
    __syncthreads();  // at: one barrier
  } else {
    __syncthreads();  // at: the other barrier
  }
}

__global__ void divergent_warp(EmulatorArguments arguments) {
  float value = arguments.input[threadIdx.x];
  if (threadIdx.x % 2 == 0) {
    value += __shfl_xor_sync(kFullWarp, value, 1);  // at: one shuffle
  } else {
    value -= __shfl_xor_sync(kFullWarp, value, 1);  // at: the other shuffle
  }
  arguments.output[threadIdx.x] = value;
}

__global__ void deadlock(EmulatorArguments) {
  if (threadIdx.x == 5) {
    __syncthreads();  // at: lonely
  } else {
    __syncwarp();  // at: company
  }
}

__global__ void leaves_out_itself(EmulatorArguments) {
  __syncwarp(threadIdx.x == 3 ? ~8u : kFullWarp);  // at: wrong mask
}

__global__ void shuffles_from_the_gone(EmulatorArguments arguments) {
  if (threadIdx.x % 32 == 7) return;
  arguments.output[threadIdx.x] = __shfl_xor_sync(kFullWarp, 1.0f, 1);  // at: from the gone
}

__global__ void product_of_a_part(EmulatorArguments arguments) {
  if (threadIdx.x == 1) return;
  float d[4] = {};
  const uint32_t a[4] = {};
  mma_m16n8k16<bfloat16>(d, a, 0, 0);  // at: product of a part
  arguments.output[threadIdx.x] = d[0];
}

__global__ void out_of_bounds(EmulatorArguments arguments) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  BOUNDS_CHECK(i < arguments.count);  // at: bounds
  arguments.output[i] = 1.0f;
}

__global__ void traps(EmulatorArguments arguments) {
  if (int(threadIdx.x) == arguments.count) __trap();  // at: trap
}

__global__ void uninitialised(EmulatorArguments arguments) {
  DYNAMIC_SHARED(memory, 128 * 4);
  __shared__ float declared[128];
  arguments.output[threadIdx.x] = reinterpret_cast<const float*>(memory)[threadIdx.x];
  arguments.output[128 + threadIdx.x] = declared[threadIdx.x];
  declared[threadIdx.x] = 1.0f;
}

// count: bytes that an address is off by. kWhat: 0 the destination, 1 the source, 2 a row of ldmatrix, 3 a vector.
template <int kWhat> __global__ void misaligned(EmulatorArguments arguments) {
  DYNAMIC_SHARED(memory, 1024);
  const auto* input = reinterpret_cast<const unsigned char*>(arguments.input);
  const int off = arguments.count;
  uint32_t registers[4] = {};
  unsigned char* own = memory + threadIdx.x * 16;
  if (kWhat == 0 && threadIdx.x < 32) cp_async_16(own + off, input, true);  // at: misaligned 0
  if (kWhat == 1 && threadIdx.x < 32) cp_async_16(own, input + off, true);  // at: misaligned 1
  if (kWhat == 2) ldmatrix_x4(registers, memory + off);          // at: misaligned 2
  if (kWhat == 3) registers[0] = reinterpret_cast<const uint4*>(input + off)->y;  // at: misaligned 3
  arguments.output[threadIdx.x] = float(registers[0]);
}

// kWhat: 0 a product that 32 bits do not hold, 1 an index beyond an array in registers, 2 null, 3 a shift, 4 a division.
template <int kWhat> __global__ void undefined(EmulatorArguments arguments) {
  const int count = arguments.count;
  int values[4] = {count, count, count, count};
  int result = 0;
  if (kWhat == 0) result = count * 65536;        // at: undefined 0
  if (kWhat == 1) result = values[count % 65536];  // at: undefined 1
  if (kWhat == 2) result = int(arguments.input[0]);   // at: undefined 2
  if (kWhat == 3) result = 1 << count;           // at: undefined 3
  if (kWhat == 4) result = 100 / (count - 7);    // at: undefined 4
  arguments.output[threadIdx.x] = float(result);
}

__global__ void overflows_its_stack(EmulatorArguments arguments) {
  volatile char local[62 << 10];
  for (char volatile& each : local) each = 1;
  arguments.output[threadIdx.x] = local[arguments.count];
}

// Threads 0 and 40 leave early; the others meet at barriers of block and warp all the same.
__global__ void early_exit(EmulatorArguments arguments) {
  DYNAMIC_SHARED(memory, 128 * 4);
  float* values = reinterpret_cast<float*>(memory);
  values[threadIdx.x] = arguments.input[threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0 || threadIdx.x == 40) return;
  const unsigned votes = __ballot_sync(kFullWarp, true);
  __syncthreads();
  arguments.output[threadIdx.x] = values[threadIdx.x ^ 1] + __popc(votes);
}

// Each half of a warp, by itself: the lower one adds its lanes up, the upper one finds its highest.
__global__ void halves(EmulatorArguments arguments) {
  const bool is_lower = threadIdx.x % 32 < 16;
  float value = arguments.input[threadIdx.x];
  if (is_lower) {
    for (int bits = 8; bits > 0; bits /= 2) value += __shfl_xor_sync(0x0000ffffu, value, bits);
  } else {
    for (int bits = 8; bits > 0; bits /= 2) value = fmaxf(value, __shfl_xor_sync(0xffff0000u, value, bits));
  }
  arguments.output[threadIdx.x] = value;
}

// In which order threads come by: twice, with a barrier of the warp between.
__global__ void order(EmulatorArguments arguments) {
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  arguments.output[atomicAdd(arguments.counter, 1)] = thread;
  __syncwarp();
  arguments.output[atomicAdd(arguments.counter, 1)] = -thread;
}

// A block adds its input up and leaves the sum; many blocks, to be run at once.
__global__ void sums(EmulatorArguments arguments) {
  __shared__ float partial[4];
  float sum = arguments.input[blockIdx.x * 128 + threadIdx.x];
  for (int bits = 16; bits > 0; bits /= 2) sum += __shfl_xor_sync(kFullWarp, sum, bits);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) arguments.output[blockIdx.x] = partial[0] + partial[1] + partial[2] + partial[3];
}

__global__ void beyond_shared(EmulatorArguments arguments) {
  DYNAMIC_SHARED(memory, 512);
  uint32_t registers[4];
  ldmatrix_x4(registers, memory + threadIdx.x % 32 * 32);  // at: beyond shared
  arguments.output[threadIdx.x] = float(registers[0]);
}

__global__ void reads_ahead(EmulatorArguments arguments) {
  arguments.output[threadIdx.x] = arguments.input[threadIdx.x + arguments.count];  // at: ahead
}
