// What happens to each row by itself: RoPE and the KV write, RMSNorm, SiLU-and-multiply.
//
// Values are computed in float32 and rounded to the tensor's dtype exactly where torch rounds when it
// evaluates the same expression in that dtype. Strides are in elements.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "codes.h"
#include "simd.h"
#include "team.h"

namespace pageturner {

// Mirrored by ctypes in ops.py.
struct KvWriteArgs {
  const void* key;    // Row [T, num_kv_heads, head_dim], rows key_stride apart
  const void* value;  // Row [T, num_kv_heads, head_dim], rows value_row_stride apart
  void* kv_layer;
  const std::int64_t* slot_mapping;
  std::int64_t key_stride, value_row_stride, block_stride, value_stride, head_stride;
  std::int32_t num_rows, num_kv_heads, head_dim, block_size;
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
  std::int32_t outer, inner, size;
  float eps;
};

constexpr int MAX_HEAD_DIM = 1024;

// Calls f(start, count) for each stretch of at most WIDTH of `size` elements.
template <class F>
void for_each_vector(int size, F f) {
  for (int i = 0; i < size; i += WIDTH) f(i, size - i < WIDTH ? size - i : WIDTH);
}

// f(row) for every row of `elements` elements.
template <class F>
void for_each_row(Team& team, std::int64_t rows, std::int64_t elements, const F& f) {
  team.for_each_stretch(rows, std::max<std::int64_t>(1, team.worth_a_thread() / elements),
                        [&](std::int64_t row, std::int64_t end) {
                          for (; row < end; row++) f(row);
                        });
}

template <class T>
void copy_row(T* to, const T* from, int size) {
  std::memcpy(to, from, size * sizeof(T));
}
inline void copy_row(bf16* to, const float* from, int size) {
  for_each_vector(size, [&](int i, int n) { store(to + i, load(from + i, n), n); });
}

// One token of a head's part of a block, `part`: its numbers to `to`, and the scale of codes behind them all.
template <class T, class Row>
void store_token(const KvWriteArgs& args, T* part, int offset, const Row* from, T* to) {
  if constexpr (is_code<T>)
    scales_of(part, args.block_size, args.head_dim)[offset] = encode(from, args.head_dim, to);
  else
    copy_row(to, from, args.head_dim);
}

// Row is the dtype of keys and values as they come, T that of the pool.
template <class T, class Row>
void write_key(const KvWriteArgs& args, T* page, int offset, const Row* key) {
  const int head_dim = args.head_dim;
  T converted[MAX_HEAD_DIM];
  store_token(args, page, offset, key, converted);
  T* to = page + offset / LANES * LANES * head_dim + offset % LANES;  // TILED16
  for (int d = 0; d < head_dim; d++) to[d * LANES] = converted[d];
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

// The row of a [T, num_kv_heads, head_dim] at one head.
template <class Row>
const Row* head_of(const void* rows, std::int64_t stride, int row, int head, int head_dim) {
  return static_cast<const Row*>(rows) + row * stride + head * head_dim;
}

template <class Row, class T>
void write_value(const KvWriteArgs& args, T* page, int offset, int row, int head) {
  T* part = page + args.value_stride;
  store_token(args, part, offset, head_of<Row>(args.value, args.value_row_stride, row, head, args.head_dim),
              part + offset * args.head_dim);
}

template <class Row, class T>
void write_kv(Team& team, const KvWriteArgs& args) {
  for_each_row(team, args.num_rows, 2 * args.num_kv_heads * args.head_dim, [&](int row) {
    for_each_slot<T>(args, row, [&](T* page, int offset, int head) {
      write_key(args, page, offset, head_of<Row>(args.key, args.key_stride, row, head, args.head_dim));
      write_value<Row>(args, page, offset, row, head);
    });
  });
}

// C is the dtype of cos and sin; torch rounds products and their sum to the wider of Row and C.
template <class Row, class C>
void rotate_head(Row* to, const Row* from, const C* cos, const C* sin, int head_dim) {
  using Wide = std::conditional_t<std::is_same_v<C, float>, float, Row>;
  const int half = head_dim / 2;
  for_each_vector(half, [&](int d, int n) {
    const Floats low = load(from + d, n), high = load(from + half + d, n);
    const auto times = [&](Floats x, const C* table) { return rounded<Wide>(x * load(table, n)); };
    store(to + d, times(low, cos + d) - times(high, sin + d), n);
    store(to + half + d, times(high, cos + half + d) + times(low, sin + half + d), n);
  });
}

template <class Row, class T, class C>
void rope_and_write_kv(Team& team, const RotateArgs& rotate, const KvWriteArgs& args) {
  const int head_dim = args.head_dim;
  for_each_row(team, args.num_rows, (rotate.num_heads + 2 * args.num_kv_heads) * head_dim, [&](int row) {
    const C* cos = static_cast<const C*>(rotate.cos) + std::int64_t{row} * head_dim;
    const C* sin = static_cast<const C*>(rotate.sin) + std::int64_t{row} * head_dim;
    Row* output = static_cast<Row*>(rotate.output) + std::int64_t{row} * rotate.num_heads * head_dim;
    for (int head = 0; head < rotate.num_heads; head++)
      rotate_head(output + head * head_dim,
                  head_of<Row>(rotate.query, rotate.query_stride, row, head, head_dim), cos, sin, head_dim);
    for_each_slot<T>(args, row, [&](T* page, int offset, int head) {
      Row turned[MAX_HEAD_DIM];
      rotate_head(turned, head_of<Row>(args.key, args.key_stride, row, head, head_dim), cos, sin, head_dim);
      write_key(args, page, offset, turned);
      write_value<Row>(args, page, offset, row, head);
    });
  });
}

// summed = residual + hidden; it may be the residual itself.
template <class T>
void add_row(const T* residual, const T* hidden, int size, T* summed) {
  for_each_vector(size, [&](int i, int n) { store(summed + i, load(residual + i, n) + load(hidden + i, n), n); });
}

template <class T>
void norm_row(const T* hidden, const T* weight, float eps, int size, T* normed) {
  Sixteen squares;
  for (int i = 0; i < size; i += LANES)
    for (int part = 0; part < LANES / WIDTH && i + part * WIDTH < size; part++) {
      const Floats x = load(hidden + i + part * WIDTH, std::min(WIDTH, size - i - part * WIDTH));
      squares.part[part] = fma(x, x, squares.part[part]);
    }
  const float scale = 1.0f / std::sqrt(squares.sum() / size + eps);
  for_each_vector(size, [&](int i, int n) {
    store(normed + i, load(weight + i, n) * rounded<T>(load(hidden + i, n) * scale), n);
  });
}

template <class T>
void rms_norm(Team& team, const RmsNormArgs& args) {
  for_each_row(team, std::int64_t{args.outer} * args.inner, args.size, [&](std::int64_t row) {
    const T* hidden = static_cast<const T*>(args.hidden) + row / args.inner * args.outer_stride +
                      row % args.inner * args.inner_stride;
    if (args.residual) {
      T* summed = static_cast<T*>(args.summed) + row * args.size;
      add_row(static_cast<const T*>(args.residual) + row * args.size, hidden, args.size, summed);
      hidden = summed;
    }
    norm_row(hidden, static_cast<const T*>(args.weight), args.eps, args.size,
             static_cast<T*>(args.normed) + row * args.size);
  });
}

// to = silu(gate) * up.
template <class T>
void gate_row(const T* gate, const T* up, int size, T* to) {
  for_each_vector(size, [&](int i, int n) {
    const Floats x = load(gate + i, n);
    store(to + i, rounded<T>(x / (1.0f + exp(-x))) * load(up + i, n), n);
  });
}

template <class T>
void silu_and_mul(Team& team, const T* gate_up, T* output, std::int64_t stride, int rows, int size) {
  for_each_row(team, rows, 2 * size, [&](std::int64_t row) {
    const T* gate = gate_up + row * stride;
    gate_row(gate, gate + size, size, output + row * size);
  });
}

}  // namespace pageturner
