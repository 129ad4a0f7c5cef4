// Sixteen floats at a time, in GCC's vector extensions: one source for AVX-512, AVX2 and anything else.
//
// Compiled with -ffp-contract=off, so that an expression rounds as it is written wherever it is inlined;
// fma() alone fuses. Hence a row's result does not depend on which template instance computed it.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace pageturner {

constexpr int LANES = 16;
using f32x8 = float __attribute__((vector_size(32)));
using f32x16 = float __attribute__((vector_size(64)));
using i32x16 = std::int32_t __attribute__((vector_size(64)));
using u32x16 = std::uint32_t __attribute__((vector_size(64)));
using i32x8 = std::int32_t __attribute__((vector_size(32)));
using u32x8 = std::uint32_t __attribute__((vector_size(32)));
using u16x8 = std::uint16_t __attribute__((vector_size(16)));
using u16x16 = std::uint16_t __attribute__((vector_size(32)));
using i8x16 = std::int8_t __attribute__((vector_size(16)));

struct bf16 {
  std::uint16_t bits;
};
struct f16 {
  std::uint16_t bits;
};

// What goes with floats of either width: integers of as many lanes.
template <class F>
struct Lanes;
template <>
struct Lanes<f32x16> {
  using Ints = i32x16;
  using Uints = u32x16;
  static constexpr Ints INDEX = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
};
template <>
struct Lanes<f32x8> {
  using Ints = i32x8;
  using Uints = u32x8;
  static constexpr Ints INDEX = {0, 1, 2, 3, 4, 5, 6, 7};
};

// As many floats as this machine takes at once, for what must be fast on all of them: GCC takes vectors that are wider
// than the machine's apart, number by number, where they are compared or go through memory.
#if defined(__FMA__) && !defined(__AVX512F__)
using Floats = f32x8;
#else
using Floats = f32x16;
#endif
constexpr int WIDTH = sizeof(Floats) / sizeof(float);

template <class F>
F splat(float x) { return x - F{}; }  // x - 0 is x, -0 and NaN included

inline f32x16 broadcast(float x) { return splat<f32x16>(x); }

template <class F>
F max(F a, F b) { return a > b ? a : b; }

inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  union Halves {
    f32x16 whole;
    __m256 half[2];
  } x{a}, y{b}, z{c};
  z.half[0] = _mm256_fmadd_ps(x.half[0], y.half[0], z.half[0]);
  z.half[1] = _mm256_fmadd_ps(x.half[1], y.half[1], z.half[1]);
  return z.whole;
#else
  return a * b + c;
#endif
}

// Fused on every machine.
inline f32x8 fma(f32x8 a, f32x8 b, f32x8 c) {
#if defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  for (int lane = 0; lane < 8; lane++) c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return c;
#endif
}

inline f32x16 load(const float* from) {
  f32x16 x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline f32x16 load(const bf16* from) {
  u16x16 half;
  std::memcpy(&half, from, sizeof half);
  return reinterpret_cast<f32x16>(__builtin_convertvector(half, u32x16) << 16);
}

// A finite one. Moved to float32's place, its exponent lacks 112, for subnormal numbers too.
inline f32x16 load(const f16* from) {
  u16x16 half;
  std::memcpy(&half, from, sizeof half);
  const u32x16 bits = __builtin_convertvector(half, u32x16);
  const f32x16 magnitude = reinterpret_cast<f32x16>((bits & 0x7fff) << 13) * 0x1p112f;
  return reinterpret_cast<f32x16>(reinterpret_cast<u32x16>(magnitude) | (bits & 0x8000) << 16);
}

// The same of either width.
template <class F>
F load_floats(const float* from) {
  F x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

template <class F>
F load_floats(const bf16* from) {
  if constexpr (sizeof(F) == sizeof(f32x16)) {
    return load(from);
  } else {
    u16x8 half;
    std::memcpy(&half, from, sizeof half);
    return reinterpret_cast<f32x8>(__builtin_convertvector(half, u32x8) << 16);
  }
}

inline void store(float* to, f32x16 x) { std::memcpy(to, &x, sizeof x); }
inline void store(float* to, f32x8 x) { std::memcpy(to, &x, sizeof x); }

// To the nearest bf16, ties to even, as torch rounds; NaN stays NaN.
inline u32x16 bf16_bits(f32x16 x) {
  const u32x16 bits = reinterpret_cast<u32x16>(x);
  const u32x16 nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return x == x ? nearest : u32x16{} + 0x7fc0;
}

inline void store(bf16* to, f32x16 x) {
  const u16x16 half = __builtin_convertvector(bf16_bits(x), u16x16);
  std::memcpy(to, &half, sizeof half);
}

// What a store to T and a load would make of x.
template <class T>
f32x16 rounded(f32x16 x);
template <>
inline f32x16 rounded<float>(f32x16 x) { return x; }
template <>
inline f32x16 rounded<bf16>(f32x16 x) { return reinterpret_cast<f32x16>(bf16_bits(x) << 16); }

// The first `count` of sixteen; the lanes behind them load as 0 and are not stored.
template <class T>
f32x16 load(const T* from, int count) {
  if (count == LANES) return load(from);
  T padded[LANES] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load(padded);
}

template <class T>
void store(T* to, f32x16 x, int count) {
  if (count == LANES) return store(to, x);
  T padded[LANES];
  store(padded, x);
  std::memcpy(to, padded, count * sizeof(T));
}

inline float sum_lanes(f32x16 x) {
  x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  x += __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  return x[0];
}

inline std::int32_t sum_lanes(i32x16 x) {
  x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  x += __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  return x[0];
}

inline float max_lanes(f32x16 x) {
  x = max(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  x = max(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  x = max(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  x = max(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return x[0];
}

inline float max_lanes(f32x8 x) {
  x = max(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
  x = max(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
  x = max(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6));
  return x[0];
}

// Whether a lane is above the limit; NaN is not.
inline bool any_above(f32x16 x, float limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_GT_OQ);
#else
  return max_lanes(x) > limit;
#endif
}
inline bool any_above(f32x8 x, float limit) {
#if defined(__FMA__)
  return _mm256_movemask_ps(_mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_GT_OQ));
#else
  return max_lanes(x) > limit;
#endif
}

// e^x to 2 ulp for x in [-87, 88]; 0 below, e^88 above, NaN for NaN; exactly 1 at 0.
// x = n ln 2 + f with |f| <= ln 2 / 2 (ln 2 in two parts, Cody and Waite 1980), then Taylor in f.
template <class F>
F exp(F x) {
  const F lowest = splat<F>(-87.0f), highest = splat<F>(88.0f);
  const F clamped = x < lowest ? lowest : (x > highest ? highest : x);
  const F shifter = splat<F>(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F shifted = fma(clamped, splat<F>(1.44269504f), shifter);
  const F n = shifted - shifter;
  F f = fma(n, splat<F>(-0.693145752f), clamped);
  f = fma(n, splat<F>(-1.42860677e-6f), f);
  F e = splat<F>(1.0f / 5040);
  e = fma(e, f, splat<F>(1.0f / 720));
  e = fma(e, f, splat<F>(1.0f / 120));
  e = fma(e, f, splat<F>(1.0f / 24));
  e = fma(e, f, splat<F>(1.0f / 6));
  e = fma(e, f, splat<F>(0.5f));
  e = fma(e, f, splat<F>(1.0f));
  e = fma(e, f, splat<F>(1.0f));
  // The low bits of `shifted` are n: add it to the exponent.
  const typename Lanes<F>::Uints scaled = reinterpret_cast<typename Lanes<F>::Uints>(e) + (reinterpret_cast<typename Lanes<F>::Uints>(shifted) << 23);
  const F result = x < lowest ? F{} : reinterpret_cast<F>(scaled);
  return x == x ? result : x;
}

inline float exp(float x) { return exp(splat<Floats>(x))[0]; }

// To 2 ulp: 1 - 2 / (e^2|x| + 1) with the sign of x, and near 0, where that cancels, Cephes' polynomial.
template <class F>
F tanh(F x) {
  const F size = x < 0.0f ? -x : x, square = x * x;
  const F far = 1.0f - 2.0f / (exp(size + size) + 1.0f);
  F near = splat<F>(-5.70498872745e-3f);
  near = fma(near, square, splat<F>(2.06390887954e-2f));
  near = fma(near, square, splat<F>(-5.37397155531e-2f));
  near = fma(near, square, splat<F>(1.33314422036e-1f));
  near = fma(near, square, splat<F>(-3.33332819422e-1f));
  near = fma(near * square, x, x);
  return size < 0.625f ? near : (x < 0.0f ? -far : far);
}

}  // namespace pageturner
