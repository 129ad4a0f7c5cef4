// What happens to each row by itself: RoPE and the KV write, RMSNorm, SiLU-and-multiply.
//
// Values are computed in float32 and rounded to the tensor's dtype exactly where torch rounds when it
// evaluates the same expression in that dtype. Strides are in elements.
#include <cmath>
#include <type_traits>

#include "simd.h"

using namespace pageturner;

extern "C" {

// Mirrored by ctypes in ops.py.
struct KvWriteArgs {
  const void* key;    // [T, num_kv_heads, head_dim], rows key_stride apart
  const void* value;  // [T, num_kv_heads, head_dim], rows value_row_stride apart
  void* kv_layer;
  const std::int64_t* slot_mapping;
  std::int64_t key_stride, value_row_stride, block_stride, value_stride, head_stride;
  std::int32_t num_rows, num_kv_heads, head_dim, block_size, num_threads;
};

struct RotateArgs {
  const void* query;  // [T, num_heads, head_dim], rows query_stride apart
  void* output;       // [T, num_heads, head_dim]
  const void* cos;    // [T, head_dim], contiguous, as sin
  const void* sin;
  std::int64_t query_stride;
  std::int32_t num_heads;
};

struct RmsNormArgs {
  const void* hidden;    // [outer, inner, size]
  const void* residual;  // [outer, inner, size] contiguous, or null
  const void* weight;    // [size]
  void* normed;          // [outer, inner, size] contiguous, as summed (unused without residual)
  void* summed;
  std::int64_t outer_stride, inner_stride;
  std::int32_t outer, inner, size, num_threads;
  float eps;
};
}

namespace {

constexpr int MAX_HEAD_DIM = 1024;
constexpr std::int64_t PARALLEL_FROM = 1 << 15;  // elements; below, a second thread costs more than it saves

template <class T>
void copy_key(T* page, const T* key, int offset, int head_dim) {
  T* to = page + offset / LANES * LANES * head_dim + offset % LANES;  // TILED16
  for (int d = 0; d < head_dim; d++) to[d * LANES] = key[d];
}

// Calls put(page of this kv head, offset in it, row, kv head) for every row that has a slot.
template <class T, class F>
void for_each_slot(const KvWriteArgs& args, int row, F put) {
  const std::int64_t slot = args.slot_mapping[row];
  if (slot < 0) return;
  T* block = static_cast<T*>(args.kv_layer) + slot / args.block_size * args.block_stride;
  const int offset = slot % args.block_size;
  for (int head = 0; head < args.num_kv_heads; head++) put(block + head * args.head_stride, offset, head);
}

template <class T>
void write_value(const KvWriteArgs& args, T* page, int offset, int row, int head) {
  const T* from = static_cast<const T*>(args.value) + row * args.value_row_stride + head * args.head_dim;
  std::memcpy(page + args.value_stride + offset * args.head_dim, from, args.head_dim * sizeof(T));
}

template <class T>
void write_kv(const KvWriteArgs& args) {
  const std::int64_t size = std::int64_t{args.num_rows} * args.num_kv_heads * args.head_dim;
#pragma omp parallel for num_threads(args.num_threads) if (size >= PARALLEL_FROM)
  for (int row = 0; row < args.num_rows; row++)
    for_each_slot<T>(args, row, [&](T* page, int offset, int head) {
      const T* key = static_cast<const T*>(args.key) + row * args.key_stride + head * args.head_dim;
      copy_key(page, key, offset, args.head_dim);
      write_value(args, page, offset, row, head);
    });
}

// Calls f(start, count) for each stretch of at most sixteen of `size` elements.
template <class F>
void for_each_vector(int size, F f) {
  for (int i = 0; i < size; i += LANES) f(i, size - i < LANES ? size - i : LANES);
}

// C is the dtype of cos and sin; torch rounds products and their sum to the wider of T and C.
template <class T, class C>
void rotate_head(T* to, const T* from, const C* cos, const C* sin, int head_dim) {
  using Wide = std::conditional_t<std::is_same_v<C, float>, float, T>;
  const int half = head_dim / 2;
  for_each_vector(half, [&](int d, int n) {
    const f32x16 low = load(from + d, n), high = load(from + half + d, n);
    const auto times = [&](f32x16 x, const C* table) { return rounded<Wide>(x * load(table, n)); };
    store(to + d, times(low, cos + d) - times(high, sin + d), n);
    store(to + half + d, times(high, cos + half + d) + times(low, sin + half + d), n);
  });
}

template <class T, class C>
void rope_and_write_kv(const RotateArgs& rotate, const KvWriteArgs& args) {
  const int head_dim = args.head_dim;
  const int heads = rotate.num_heads + 2 * args.num_kv_heads;
  const std::int64_t size = std::int64_t{args.num_rows} * heads * head_dim;
#pragma omp parallel for num_threads(args.num_threads) if (size >= PARALLEL_FROM)
  for (int row = 0; row < args.num_rows; row++) {
    const C* cos = static_cast<const C*>(rotate.cos) + std::int64_t{row} * head_dim;
    const C* sin = static_cast<const C*>(rotate.sin) + std::int64_t{row} * head_dim;
    const T* query = static_cast<const T*>(rotate.query) + row * rotate.query_stride;
    T* output = static_cast<T*>(rotate.output) + std::int64_t{row} * rotate.num_heads * head_dim;
    for (int head = 0; head < rotate.num_heads; head++)
      rotate_head(output + head * head_dim, query + head * head_dim, cos, sin, head_dim);
    for_each_slot<T>(args, row, [&](T* page, int offset, int head) {
      T turned[MAX_HEAD_DIM];
      const T* key = static_cast<const T*>(args.key) + row * args.key_stride + head * head_dim;
      rotate_head(turned, key, cos, sin, head_dim);
      copy_key(page, turned, offset, head_dim);
      write_value(args, page, offset, row, head);
    });
  }
}

template <class T>
void rms_norm(const RmsNormArgs& args) {
  const std::int64_t rows = std::int64_t{args.outer} * args.inner;
#pragma omp parallel for num_threads(args.num_threads) if (rows * args.size >= PARALLEL_FROM)
  for (std::int64_t row = 0; row < rows; row++) {
    const T* hidden = static_cast<const T*>(args.hidden) + row / args.inner * args.outer_stride +
                      row % args.inner * args.inner_stride;
    if (args.residual) {
      const T* residual = static_cast<const T*>(args.residual) + row * args.size;
      T* summed = static_cast<T*>(args.summed) + row * args.size;
      for_each_vector(args.size, [&](int i, int n) {
        store(summed + i, load(residual + i, n) + load(hidden + i, n), n);
      });
      hidden = summed;
    }
    f32x16 squares = {};
    for_each_vector(args.size, [&](int i, int n) {
      const f32x16 x = load(hidden + i, n);
      squares = fma(x, x, squares);
    });
    const float scale = 1.0f / std::sqrt(sum_lanes(squares) / args.size + args.eps);
    const T* weight = static_cast<const T*>(args.weight);
    T* normed = static_cast<T*>(args.normed) + row * args.size;
    for_each_vector(args.size, [&](int i, int n) {
      store(normed + i, load(weight + i, n) * rounded<T>(load(hidden + i, n) * scale), n);
    });
  }
}

template <class T>
void silu_and_mul(const T* gate_up, T* output, std::int64_t stride, int rows, int size, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (std::int64_t{rows} * size >= PARALLEL_FROM)
  for (int row = 0; row < rows; row++) {
    const T* gate = gate_up + row * stride;
    const T* up = gate + size;
    T* to = output + std::int64_t{row} * size;
    for_each_vector(size, [&](int i, int n) {
      const f32x16 x = load(gate + i, n);
      store(to + i, rounded<T>(x / (1.0f + exp(-x))) * load(up + i, n), n);
    });
  }
}

}  // namespace

extern "C" {

void write_kv_float32(const KvWriteArgs* args) { write_kv<float>(*args); }
void write_kv_bfloat16(const KvWriteArgs* args) { write_kv<bf16>(*args); }

// cos and sin are float32, or the same as the rows.
void rope_and_write_kv_float32_float32(const RotateArgs* rotate, const KvWriteArgs* args) {
  rope_and_write_kv<float, float>(*rotate, *args);
}
void rope_and_write_kv_float32_bfloat16(const RotateArgs* rotate, const KvWriteArgs* args) {
  rope_and_write_kv<bf16, float>(*rotate, *args);
}
void rope_and_write_kv_same_float32(const RotateArgs* rotate, const KvWriteArgs* args) {
  rope_and_write_kv<float, float>(*rotate, *args);
}
void rope_and_write_kv_same_bfloat16(const RotateArgs* rotate, const KvWriteArgs* args) {
  rope_and_write_kv<bf16, bf16>(*rotate, *args);
}

void rms_norm_float32(const RmsNormArgs* args) { rms_norm<float>(*args); }
void rms_norm_bfloat16(const RmsNormArgs* args) { rms_norm<bf16>(*args); }

void silu_and_mul_float32(const float* gate_up, float* output, std::int64_t stride, int rows, int size,
                          int threads) {
  silu_and_mul(gate_up, output, stride, rows, size, threads);
}
void silu_and_mul_bfloat16(const bf16* gate_up, bf16* output, std::int64_t stride, int rows, int size,
                           int threads) {
  silu_and_mul(gate_up, output, stride, rows, size, threads);
}

std::int64_t sizeof_kv_write_args() { return sizeof(KvWriteArgs); }
std::int64_t sizeof_rotate_args() { return sizeof(RotateArgs); }
std::int64_t sizeof_rms_norm_args() { return sizeof(RmsNormArgs); }
}
