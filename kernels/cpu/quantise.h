// Rows of float32 as int8 in groups: what products read of an activation. reference.quantise_rows defines it.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "rows.h"
#include "simd.h"
#include "team.h"

namespace pageturner {

// A group of one row. A row is in / GROUP of them, one after another.
template <int GROUP>
struct CodeGroup {
  float scale;             // 0 for zeros, NaN where a value is not finite
  float shift;             // scale * sum: what an offset of the weight is multiplied by
  std::int32_t sum;        // of the codes
  std::int32_t unsigned_start;  // -128 * sum: what to start from where a weight's codes are raised by 128
  std::int8_t codes[GROUP];
};
static_assert(sizeof(CodeGroup<32>) == 48 && sizeof(CodeGroup<16>) == 32 && sizeof(CodeGroup<8>) == 24);

inline std::int64_t code_row_bytes(std::int64_t in_features, int group) {
  return in_features / group * (group + 16);
}

// In vectors of floats; where one is wider than the group, zeros fill it.
template <int GROUP>
constexpr int GROUP_VECTORS = (GROUP + WIDTH - 1) / WIDTH;

template <int GROUP>
void quantise_group(const Floats (&x)[GROUP_VECTORS<GROUP>], CodeGroup<GROUP>& to) {
  constexpr std::int32_t INFINITE = 0x7f800000;  // magnitudes from here on are infinities and NaN
  Ints top = {};
  for (const Floats& part : x) {
    const Ints magnitude = reinterpret_cast<Ints>(part) & 0x7fffffff;  // ordered as the floats are
    top = magnitude > top ? magnitude : top;
  }
  const float largest = max_lanes(reinterpret_cast<Floats>(top > INFINITE ? Ints{} + INFINITE : top));
  const float scale = largest / 127.0f;
  to = {};
  if (largest == INFINITY) {
    to.scale = to.shift = NAN;
  } else if (scale >= FLT_MIN) {
    const float inverse = 1.0f / scale;
    Ints sum = {};
    for (int part = 0; part < GROUP_VECTORS<GROUP>; part++) {
      // Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the low bits. It is at most 127,
      // since neither the scale nor its inverse is subnormal.
      const Ints rounded = reinterpret_cast<Ints>(x[part] * inverse + 12582912.0f) - 0x4b400000;
      // In two steps: GCC takes one of both apart for AVX2, byte by byte.
      const Bytes narrow = __builtin_convertvector(__builtin_convertvector(rounded, Halves), Bytes);
      std::memcpy(to.codes + part * WIDTH, &narrow, std::min<int>(GROUP, sizeof narrow));
      sum += rounded;
    }
    to.scale = scale;
    to.sum = sum_lanes(sum);
    to.shift = scale * float(to.sum);
    to.unsigned_start = -128 * to.sum;
  }
}

template <int GROUP>
void quantise_row(const float* row, int in_features, CodeGroup<GROUP>* to) {
  for (int i = 0; i < in_features; i += GROUP) {
    Floats x[GROUP_VECTORS<GROUP>];
    for (int part = 0; part < GROUP_VECTORS<GROUP>; part++)
      x[part] = load(row + i + part * WIDTH, std::min(GROUP, WIDTH));
    quantise_group(x, *to++);
  }
}

// to: code_row_bytes for each row.
inline void quantise_row(const float* row, int in_features, int group, void* to) {
  if (group == 32)
    quantise_row(row, in_features, static_cast<CodeGroup<32>*>(to));
  else
    quantise_row(row, in_features, static_cast<CodeGroup<16>*>(to));
}

inline void quantise_rows(Team& team, const float* rows, std::int64_t row_stride, int num_rows,
                          int in_features, int group, void* codes) {
  const std::int64_t bytes = code_row_bytes(in_features, group);
  for_each_row(team, num_rows, in_features, [&](std::int64_t row) {
    quantise_row(rows + row * row_stride, in_features, group, static_cast<char*>(codes) + row * bytes);
  });
}

}  // namespace pageturner
