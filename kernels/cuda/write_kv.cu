// A step's keys and values into their slots of the pool, as they are or with rotary embedding on the way; or as codes.
//
//   grid       (rows, parts of a row)                      block   128 threads, no barrier
//   work       of a thread: two octets (16-byte accesses), below; no loop, no shared memory
//   registers  write_kv 32, rope_and_write_kv 56: an SM holds 1152 threads or more
//   access     neighbouring threads hold neighbouring octets: a warp reads and writes runs of a head, or with
//              rope of half a head, which from head_dim 32 on is a full 32-byte sector
//
// Slots of a batch are distinct: no two threads write the same place. Inputs may lie anywhere; the pool, the
// table and the rotated query begin at multiples of 16 bytes.
#include "arguments.cuh"
#include "octet.cuh"

// Where dim 0 of a head lies in the layer's keys, and in its values too. 64 bits: a pool may exceed 4 GiB.
__device__ __forceinline__ int64_t head_in_slot(const KvLayer& kv, int64_t slot, int head, int head_dim) {
  BOUNDS_CHECK(slot < int64_t(kv.num_blocks) << kv.block_size_log2);
  const int64_t block = slot >> kv.block_size_log2;
  const int64_t offset = slot - (block << kv.block_size_log2);
  return block * kv.block_stride + head * kv.head_stride + offset * head_dim;
}

// A thread copies the same octet of a row's key and of its value.
template <class T> __global__ void __launch_bounds__(kRowThreads) write_kv(const KvWriteArguments args) {
  const int row = blockIdx.x;
  const int item = blockIdx.y * kRowThreads + threadIdx.x;
  const int octets = args.head_dim / kOctet;  // of a head
  const int head = item / octets;
  const int dim = item % octets * kOctet;
  if (head >= args.num_kv_heads) return;

  const int64_t slot = args.slot_mapping[row];
  const int64_t in_row = head * args.head_dim + dim;
  const uint4 key = load_octet(static_cast<const T*>(args.key) + row * args.key_stride + in_row);
  const uint4 value = load_octet(static_cast<const T*>(args.value) + row * args.value_stride + in_row);
  if (slot < 0) return;  // padding, or a token whose key is in the pool already
  const int64_t in_pool = head_in_slot(args.kv, slot, head, args.head_dim) + dim;
  octet_at(static_cast<T*>(args.kv.keys) + in_pool) = key;
  octet_at(static_cast<T*>(args.kv.values) + in_pool) = value;
}

// The type that products and sums are rounded to: the wider of the rows' and the table's.
template <class T, class Table> struct Wider { using type = T; };
template <class T> struct Wider<T, float> { using type = float; };

template <class Wide> __device__ __forceinline__ float rounded_to(float value) {
  return rounded<Wide>(value);
}
template <> __device__ __forceinline__ float rounded_to<float>(float value) { return value; }

__device__ __forceinline__ void load_table(float (&to)[kOctet], const float* from) {
  for (int i = 0; i < kOctet; i += 4) {
    const float4 entries = *reinterpret_cast<const float4*>(from + i);
    to[i] = entries.x, to[i + 1] = entries.y, to[i + 2] = entries.z, to[i + 3] = entries.w;
  }
}

template <class T> __device__ __forceinline__ void load_table(float (&to)[kOctet], const T* from) {
  unpack_octet<T>(to, octet_at(from));
}

// Turns a head's dims (d, d + half) for eight neighbouring d, in place; cos and sin point to entry d.
//
//   low'  = low  * cos[d]        - high * sin[d]
//   high' = high * cos[d + half] + low  * sin[d + half]
//
// The _rn intrinsics keep each product a rounding of its own, as torch has it: the compiler must not fuse it
// with the sum.
template <class T, class Table>
__device__ __forceinline__ void rotate(uint4& low_octet, uint4& high_octet, const Table* cos,
                                       const Table* sin, int half) {
  using Wide = typename Wider<T, Table>::type;
  float low[kOctet], high[kOctet], cos_low[kOctet], sin_low[kOctet], cos_high[kOctet], sin_high[kOctet];
  unpack_octet<T>(low, low_octet);
  unpack_octet<T>(high, high_octet);
  load_table(cos_low, cos);
  load_table(sin_low, sin);
  load_table(cos_high, cos + half);
  load_table(sin_high, sin + half);
  for (int i = 0; i < kOctet; i++) {
    const float low_cos = rounded_to<Wide>(__fmul_rn(low[i], cos_low[i]));
    const float high_sin = rounded_to<Wide>(__fmul_rn(high[i], sin_low[i]));
    const float high_cos = rounded_to<Wide>(__fmul_rn(high[i], cos_high[i]));
    const float low_sin = rounded_to<Wide>(__fmul_rn(low[i], sin_high[i]));
    low[i] = __fsub_rn(low_cos, high_sin);
    high[i] = __fadd_rn(high_cos, low_sin);
  }
  low_octet = pack_octet<T>(low);
  high_octet = pack_octet<T>(high);
}

// A thread takes two octets of one head, half a head apart: they turn together.
//
//   head of a row   0 .. num_heads   | .. + num_kv_heads | .. + num_kv_heads
//                   query, turned    | key, turned       | value, as it is
//                   -> rotated_query | -> the slot's key | -> the slot's value
//
// A row without a slot still has a query. The slot is loaded first and looked at last, so that it and the row
// are on their way together.
template <class T, class Table>
__global__ void __launch_bounds__(kRowThreads) rope_and_write_kv(const KvWriteArguments args) {
  const int row = blockIdx.x;
  const int item = blockIdx.y * kRowThreads + threadIdx.x;
  const int half = args.head_dim / 2;
  const int pairs = half / kOctet;  // of a head
  const int head = item / pairs;
  const int dim = item % pairs * kOctet;
  const int key_head = head - args.num_heads;
  const int value_head = key_head - args.num_kv_heads;
  if (value_head >= args.num_kv_heads) return;

  const int64_t slot = args.slot_mapping[row];
  const T* from;
  if (key_head < 0)
    from = static_cast<const T*>(args.query) + row * args.query_stride + head * args.head_dim;
  else if (value_head < 0)
    from = static_cast<const T*>(args.key) + row * args.key_stride + key_head * args.head_dim;
  else
    from = static_cast<const T*>(args.value) + row * args.value_stride + value_head * args.head_dim;

  uint4 low = load_octet(from + dim);
  uint4 high = load_octet(from + half + dim);
  if (value_head < 0) {
    const int64_t in_table = int64_t(row) * args.head_dim + dim;
    rotate<T>(low, high, static_cast<const Table*>(args.cos) + in_table,
              static_cast<const Table*>(args.sin) + in_table, half);
  }

  T* to;
  if (key_head < 0) {
    to = static_cast<T*>(args.rotated_query) + (int64_t(row) * args.num_heads + head) * args.head_dim;
  } else {
    if (slot < 0) return;
    to = value_head < 0
             ? static_cast<T*>(args.kv.keys) + head_in_slot(args.kv, slot, key_head, args.head_dim)
             : static_cast<T*>(args.kv.values) + head_in_slot(args.kv, slot, value_head, args.head_dim);
  }
  octet_at(to + dim) = low;
  octet_at(to + half + dim) = high;
}

// The same into a pool of codes (kernels/kv_codes.py). Half a warp takes a head: all its dims decide on its scale.
//
//   work       of a thread: dims lane, lane + 16 .. of the head's first half, and those half a head further on
//   registers  37 to 56; element by element, since a step writes little beside what it reads
//   exchange   among a half's lanes alone: whether they need one is of their own head
constexpr int kHalfWarp = kWarpSize / 2;
constexpr int kMostPairs = 8;  // of a thread: head_dim at most 256

// The code of a number that rounds to one: the nearest, ties to even. Bits as kernels/cpu/simd.h has them.
template <class Code> __device__ __forceinline__ Code code_of(float number);

template <> __device__ __forceinline__ int8_code code_of<int8_code>(float number) {
  return {(unsigned char)__float_as_uint(__fadd_rn(number, 12582912.0f))};
}

template <> __device__ __forceinline__ fp8_code code_of<fp8_code>(float number) {
  const uint32_t bits = __float_as_uint(number), magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - (120u << 23) + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
  const uint32_t small = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 16384.0f)) & 0x7fu;
  return {(unsigned char)((magnitude < 121u << 23 ? small : normal) | (bits >> 24 & 0x80u))};
}

template <class Code> constexpr float kMostCode = 0.0f;
template <> constexpr float kMostCode<int8_code> = 127.0f;
template <> constexpr float kMostCode<fp8_code> = 448.0f;

template <class Code> constexpr bool kChoosesScale = false;
template <> constexpr bool kChoosesScale<fp8_code> = true;

__device__ __forceinline__ uint32_t lanes_of_half() { return threadIdx.x % kWarpSize < kHalfWarp ? 0xffffu : 0xffff0000u; }

constexpr int kScales = 8;  // candidates within an octave, which is 128 of a bfloat16's bits

// Each of -464 to 464 to the nearest float of four bits, as kernels/cpu/codes.h has it.
__device__ __forceinline__ float nearest_float8(float steps) {
  const float above = __fmul_rn(steps, 1048577.0f);
  return __fsub_rn(above, __fsub_rn(above, steps));
}

// `units` are of the smallest scale.
__device__ __forceinline__ int32_t squared_error(float number, float inverse, float units) {
  const float steps = __fmul_rn(number, inverse);
  const float error = __fmul_rn(__fsub_rn(steps, nearest_float8(steps)), units);
  return int32_t(__fmul_rn(error, error));
}

// Of the candidates from the smallest scale on, the one of least squared error. A lane's numbers beyond its head's are
// zeros, which have none.
__device__ __forceinline__ bfloat16 least_error(const float (&low)[kMostPairs], const float (&high)[kMostPairs],
                                                bfloat16 smallest) {
  const float of_smallest = __fdiv_rn(1.0f, to_float(smallest));
  bfloat16 best = smallest;
  int32_t least = 0x7fffffff;
#pragma unroll 1
  for (int k = 0; k < kScales; ++k) {
    const bfloat16 candidate = {uint16_t(smallest.bits + k * 128 / kScales)};
    const float inverse = __fdiv_rn(1.0f, to_float(candidate));
    const float units = __fmul_rn(__fmul_rn(to_float(candidate), of_smallest), 32.0f);
    int32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kMostPairs; ++i)
      sum += squared_error(low[i], inverse, units) + squared_error(high[i], inverse, units);
#pragma unroll
    for (int lanes = kHalfWarp / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(lanes_of_half(), sum, lanes);
    if (sum < least) least = sum, best = candidate;
  }
  return best;
}

// Where the scale of a head in a slot lies, in bytes from the layer's keys, and from its values too.
__device__ __forceinline__ int64_t scale_in_slot(const KvLayer& kv, int64_t slot, int head, int head_dim) {
  const int64_t block = slot >> kv.block_size_log2;
  const int64_t offset = slot - (block << kv.block_size_log2);
  return block * kv.block_stride + head * kv.head_stride + (int64_t(head_dim) << kv.block_size_log2) + 2 * offset;
}

__device__ __forceinline__ float as_float(float entry) { return entry; }
template <class T> __device__ __forceinline__ float as_float(T entry) { return to_float(entry); }

// What rotate does to eight pairs, to one: low and high are as far apart, cos and sin point to low's entry.
template <class T, class Table>
__device__ __forceinline__ void turn(float& low, float& high, const Table* cos, const Table* sin, int half) {
  using Wide = typename Wider<T, Table>::type;
  const float low_cos = rounded_to<Wide>(__fmul_rn(low, as_float(cos[0])));
  const float high_sin = rounded_to<Wide>(__fmul_rn(high, as_float(sin[0])));
  const float high_cos = rounded_to<Wide>(__fmul_rn(high, as_float(cos[half])));
  const float low_sin = rounded_to<Wide>(__fmul_rn(low, as_float(sin[half])));
  low = rounded<T>(__fsub_rn(low_cos, high_sin));
  high = rounded<T>(__fadd_rn(high_cos, low_sin));
}

// kRotate: heads are those of rope_and_write_kv, else those of write_kv: keys, then values.
template <class T, class Code, class Table, bool kRotate>
__global__ void __launch_bounds__(kRowThreads) coded_write_kv(const KvWriteArguments args) {
  const int row = blockIdx.x;
  const int lane = threadIdx.x % kHalfWarp;
  const int head = (blockIdx.y * kRowThreads + threadIdx.x) / kHalfWarp;
  const int half = args.head_dim / 2;
  const int key_head = head - (kRotate ? args.num_heads : 0);
  const int value_head = key_head - args.num_kv_heads;
  const bool is_query = key_head < 0, is_value = value_head >= 0;
  const bool exists = value_head < args.num_kv_heads;  // else it takes part in the exchange alone
  BOUNDS_CHECK(half <= kMostPairs * kHalfWarp);

  const T* from;
  if (is_query)
    from = static_cast<const T*>(args.query) + row * args.query_stride + head * args.head_dim;
  else if (!is_value)
    from = static_cast<const T*>(args.key) + row * args.key_stride + key_head * args.head_dim;
  else
    from = static_cast<const T*>(args.value) + row * args.value_stride + value_head * args.head_dim;

  float low[kMostPairs], high[kMostPairs];
  uint32_t top = 0;  // the largest magnitude's bits, which are ordered as magnitudes are, infinities and NaN behind
#pragma unroll
  for (int i = 0; i < kMostPairs; ++i) {
    const int dim = lane + i * kHalfWarp;
    low[i] = high[i] = 0.0f;
    if (exists && dim < half) {
      low[i] = to_float(from[dim]);
      high[i] = to_float(from[half + dim]);
      if (kRotate && !is_value) {
        const int64_t in_table = int64_t(row) * args.head_dim + dim;
        turn<T>(low[i], high[i], static_cast<const Table*>(args.cos) + in_table,
                static_cast<const Table*>(args.sin) + in_table, half);
      }
      top = max(top, max(__float_as_uint(low[i]) & 0x7fffffffu, __float_as_uint(high[i]) & 0x7fffffffu));
    }
  }
#pragma unroll
  for (int lanes = kHalfWarp / 2; lanes > 0; lanes /= 2) top = max(top, __shfl_xor_sync(kFullWarp, top, lanes));
  if (!exists) return;

  if (is_query) {
    T* const to = static_cast<T*>(args.rotated_query) + (int64_t(row) * args.num_heads + head) * args.head_dim;
#pragma unroll
    for (int i = 0; i < kMostPairs; ++i) {
      const int dim = lane + i * kHalfWarp;
      if (dim < half) to[dim] = from_float<T>(low[i]), to[half + dim] = from_float<T>(high[i]);
    }
    return;
  }
  const int64_t slot = args.slot_mapping[row];
  if (slot < 0) return;
  const bool is_finite = top < 0x7f800000u;
  bfloat16 scale = from_float<bfloat16>(__fdiv_rn(__uint_as_float(top), kMostCode<Code>));
  const bool coded = is_finite && to_float(scale) >= 0x1p-126f;
  if (kChoosesScale<Code> && coded) scale = least_error(low, high, scale);
  const float inverse = coded ? __fdiv_rn(1.0f, to_float(scale)) : 0.0f;
  unsigned char* const pool = static_cast<unsigned char*>(is_value ? args.kv.values : args.kv.keys);
  const int kv_head = is_value ? value_head : key_head;
  Code* const codes = reinterpret_cast<Code*>(pool + head_in_slot(args.kv, slot, kv_head, args.head_dim));
#pragma unroll
  for (int i = 0; i < kMostPairs; ++i) {
    const int dim = lane + i * kHalfWarp;
    if (dim < half) {
      codes[dim] = coded ? code_of<Code>(__fmul_rn(low[i], inverse)) : Code{0};
      codes[half + dim] = coded ? code_of<Code>(__fmul_rn(high[i], inverse)) : Code{0};
    }
  }
  if (lane == 0) {
    const bfloat16 kept_scale = {uint16_t(coded ? scale.bits : is_finite ? 0 : 0x7fc0)};
    *reinterpret_cast<bfloat16*>(pool + scale_in_slot(args.kv, slot, kv_head, args.head_dim)) = kept_scale;
  }
}
