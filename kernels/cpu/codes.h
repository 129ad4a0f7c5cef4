// Keys and values as codes with a scale for each token and head. kernels/kv_codes.py defines the numbers, and
// kernels/layout.py where they lie: behind the codes of a head's part of a block.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace pageturner {

template <class T>
constexpr bool is_code = false;
template <>
inline constexpr bool is_code<i8> = true;
template <>
inline constexpr bool is_code<f8> = true;

template <class Code>
constexpr float MOST_CODE = 0;
template <>
inline constexpr float MOST_CODE<i8> = 127.0f;
template <>
inline constexpr float MOST_CODE<f8> = 448.0f;

// The scales of a head's part of a block, token by token.
template <class Code>
const bf16* scales_of(const Code* part, int block_size, int head_dim) {
  return reinterpret_cast<const bf16*>(part + std::int64_t{block_size} * head_dim);
}
template <class Code>
bf16* scales_of(Code* part, int block_size, int head_dim) {
  return reinterpret_cast<bf16*>(part + std::int64_t{block_size} * head_dim);
}

inline float as_float(bf16 x) {
  const std::uint32_t bits = std::uint32_t{x.bits} << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

constexpr int SCALES = 8;  // candidates within an octave, which is 128 of a bfloat16's bits

// Each of -464 to 464 to the nearest float of four bits (Veltkamp's splitting: Dekker 1971, Boldo 2006), of two as near
// to either. Below 2^-6 e4m3 has wider steps than that; no error there comes to a unit either way.
inline Floats nearest_float8(Floats steps) {
  const Floats above = steps * 1048577.0f;  // 2^20 + 1
  return above - (above - steps);
}

// Of the candidates from the smallest scale on, the one of least squared error, in whole units: see kv_codes.py.
template <class Row>
bf16 least_error(const Row* row, int head_dim, bf16 smallest) {
  const float of_smallest = 1.0f / as_float(smallest);
  bf16 best = smallest;
  std::int32_t least = INT32_MAX;
  for (int k = 0; k < SCALES; k++) {
    const bf16 candidate = {std::uint16_t(smallest.bits + k * 128 / SCALES)};
    const float inverse = 1.0f / as_float(candidate), units = as_float(candidate) * of_smallest * 32.0f;
    Ints sums = {};
    for (int d = 0; d < head_dim; d += WIDTH) {
      const Floats steps = load(row + d) * inverse;
      const Floats error = (steps - nearest_float8(steps)) * units;
      sums += __builtin_convertvector(error * error, Ints);
    }
    const std::int32_t sum = sum_lanes(sums);
    if (sum < least) least = sum, best = candidate;
  }
  return best;
}

// The codes of one token's head; returns its scale: NaN where a number is not finite, 0 where all are as good as 0.
template <class Code, class Row>
bf16 encode(const Row* row, int head_dim, Code* codes) {
  constexpr std::int32_t INFINITE = 0x7f800000;  // magnitudes from here on are infinities and NaN
  Ints top = {};
  for (int d = 0; d < head_dim; d += WIDTH) {
    const Ints magnitude = reinterpret_cast<Ints>(load(row + d)) & 0x7fffffff;  // ordered as the floats are
    top = magnitude > top ? magnitude : top;
  }
  const float largest = max_lanes(reinterpret_cast<Floats>(top > INFINITE ? Ints{} + INFINITE : top));
  bf16 scale = {std::uint16_t(bf16_bits(splat(largest / MOST_CODE<Code>))[0])};
  const bool coded = largest != INFINITY && as_float(scale) >= FLT_MIN;
  if (!coded) {
    std::memset(codes, 0, head_dim);
    return {std::uint16_t(largest == INFINITY ? 0x7fc0 : 0)};
  }
  if constexpr (std::is_same_v<Code, f8>) scale = least_error(row, head_dim, scale);
  const float inverse = 1.0f / as_float(scale);
  for (int d = 0; d < head_dim; d += WIDTH) store(codes + d, load(row + d) * inverse);
  return scale;
}

}  // namespace pageturner
