// Many floats at a time, in GCC's vector extensions: one source for AVX-512, AVX2 and anything else.
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
using i32x8 = std::int32_t __attribute__((vector_size(32)));
using i32x16 = std::int32_t __attribute__((vector_size(64)));

// As many numbers as this machine takes at once, at most sixteen: GCC takes vectors that are wider than the machine's
// apart, number by number, where they are compared or go through memory.
#if defined(__FMA__) && !defined(__AVX512F__)
constexpr int WIDTH = 8;
using Floats = f32x8;
using Ints = i32x8;
constexpr Ints LANE_INDEX = {0, 1, 2, 3, 4, 5, 6, 7};
#else
constexpr int WIDTH = LANES;
using Floats = f32x16;
using Ints = i32x16;
constexpr Ints LANE_INDEX = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#endif
using Uints = std::uint32_t __attribute__((vector_size(4 * WIDTH)));
using Halves = std::uint16_t __attribute__((vector_size(2 * WIDTH)));
using Bytes = std::int8_t __attribute__((vector_size(WIDTH)));

struct bf16 {
  std::uint16_t bits;
};
struct f16 {
  std::uint16_t bits;
};

// Codes of keys and values: kernels/kv_codes.py.
struct i8 {
  std::int8_t bits;
};
struct f8 {
  std::uint8_t bits;  // e4m3: a sign, 4 bits of exponent, 3 of mantissa; all seven set are no number
};

inline Floats splat(float x) { return x - Floats{}; }  // x - 0 is x, -0 and NaN included

template <class F>
F max(F a, F b) { return a > b ? a : b; }

// Fused where Floats are; not where there is FMA for eight alone.
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
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

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline Floats load(const bf16* from) {
  Halves half;
  std::memcpy(&half, from, sizeof half);
  return reinterpret_cast<Floats>(__builtin_convertvector(half, Uints) << 16);
}

// A finite one. Moved to float32's place, its exponent lacks 112, for subnormal numbers too.
inline Floats load(const f16* from) {
  Halves half;
  std::memcpy(&half, from, sizeof half);
  const Uints bits = __builtin_convertvector(half, Uints);
  const Floats magnitude = reinterpret_cast<Floats>((bits & 0x7fff) << 13) * 0x1p112f;
  return reinterpret_cast<Floats>(reinterpret_cast<Uints>(magnitude) | (bits & 0x8000) << 16);
}

inline Ints widened(const i8* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Ints>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__FMA__)
  return reinterpret_cast<Ints>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  Bytes codes;
  std::memcpy(&codes, from, sizeof codes);
  return __builtin_convertvector(codes, Ints);
#endif
}

inline Floats load(const i8* from) { return __builtin_convertvector(widened(from), Floats); }

// As for f16: moved to float32's place, the exponent lacks 120. The sign is kept beside: widened, it is the highest
// bit and those below it, which the shift drops.
inline Floats load(const f8* from) {
  const Uints bits = reinterpret_cast<Uints>(widened(reinterpret_cast<const i8*>(from)));
  const Floats magnitude = reinterpret_cast<Floats>((bits & 0x7f) << 20) * 0x1p120f;
  return reinterpret_cast<Floats>(reinterpret_cast<Uints>(magnitude) | (bits & 0x80000000));
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

// To the nearest bf16, ties to even, as torch rounds; NaN stays NaN.
inline Uints bf16_bits(Floats x) {
  const Uints bits = reinterpret_cast<Uints>(x);
  const Uints nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return x == x ? nearest : Uints{} + 0x7fc0;
}

inline void store(bf16* to, Floats x) {
  const Halves half = __builtin_convertvector(bf16_bits(x), Halves);
  std::memcpy(to, &half, sizeof half);
}

inline Bytes narrowed(Uints low) {
  // In two steps: GCC takes one of both apart for AVX2, byte by byte.
  return __builtin_convertvector(__builtin_convertvector(low, Halves), Bytes);
}

// To the nearest integer, ties to even, of -127 to 127: adding 1.5 * 2^23 leaves it in the low bits.
inline void store(i8* to, Floats x) {
  const Bytes codes = narrowed(reinterpret_cast<Uints>(x + 12582912.0f));
  std::memcpy(to, &codes, sizeof codes);
}

// To the nearest e4m3, ties to even; x rounds to one of -448 to 448. Below 2^-6, the smallest normal one, steps are as
// wide as the last bit of a float32 beside 2^14.
inline void store(f8* to, Floats x) {
  const Uints bits = reinterpret_cast<Uints>(x), magnitude = bits & 0x7fffffff;
  const Uints normal = (magnitude - (120u << 23) + 0x7ffff + ((magnitude >> 20) & 1)) >> 20;
  const Uints small = reinterpret_cast<Uints>(reinterpret_cast<Floats>(magnitude) + 0x1p14f);
  const Bytes codes = narrowed((magnitude < 121u << 23 ? small & 0x7f : normal) | (bits >> 24 & 0x80));
  std::memcpy(to, &codes, sizeof codes);
}

// What a store to T and a load would make of x.
template <class T>
Floats rounded(Floats x);
template <>
inline Floats rounded<float>(Floats x) { return x; }
template <>
inline Floats rounded<bf16>(Floats x) { return reinterpret_cast<Floats>(bf16_bits(x) << 16); }

// The first `count` of WIDTH; the lanes behind them load as 0 and are not stored.
template <class T>
Floats load(const T* from, int count) {
  if (count == WIDTH) return load(from);
  T padded[WIDTH] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load(padded);
}

template <class T>
void store(T* to, Floats x, int count) {
  if (count == WIDTH) return store(to, x);
  T padded[WIDTH];
  store(padded, x);
  std::memcpy(to, padded, count * sizeof(T));
}

// All lanes in one, half on half.
template <class V, class F>
auto folded(V x, const F& f) {
  if constexpr (sizeof(V) == sizeof(f32x16)) {
    return folded(f(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7),
                    __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15)),
                  f);
  } else {
    x = f(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
    x = f(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
    x = f(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6));
    return x[0];
  }
}

template <class V>
auto sum_lanes(V x) {
  return folded(x, [](auto a, auto b) { return a + b; });
}
template <class V>
auto max_lanes(V x) {
  return folded(x, [](auto a, auto b) { return max(a, b); });
}

// Sixteen sums, in as many vectors as hold them, as one: in the same order whatever their width.
struct Sixteen {
  Floats part[LANES / WIDTH] = {};

  float sum() const {
    Floats all = part[0];
    for (int i = 1; i < LANES / WIDTH; i++) all += part[i];
    return sum_lanes(all);
  }
};

// Whether a lane is above the limit; NaN is not.
inline bool any_above(Floats x, float limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_GT_OQ);
#elif defined(__FMA__)
  return _mm256_movemask_ps(_mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_GT_OQ));
#else
  return max_lanes(x) > limit;
#endif
}

// e^x to 2 ulp for x in [-87, 88]; 0 below, e^88 above, NaN for NaN; exactly 1 at 0.
// x = n ln 2 + f with |f| <= ln 2 / 2 (ln 2 in two parts, Cody and Waite 1980), then Taylor in f.
inline Floats exp(Floats x) {
  const Floats lowest = splat(-87.0f), highest = splat(88.0f);
  const Floats clamped = x < lowest ? lowest : (x > highest ? highest : x);
  const Floats shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = fma(clamped, splat(1.44269504f), shifter);
  const Floats n = shifted - shifter;
  Floats f = fma(n, splat(-0.693145752f), clamped);
  f = fma(n, splat(-1.42860677e-6f), f);
  Floats e = splat(1.0f / 5040);
  e = fma(e, f, splat(1.0f / 720));
  e = fma(e, f, splat(1.0f / 120));
  e = fma(e, f, splat(1.0f / 24));
  e = fma(e, f, splat(1.0f / 6));
  e = fma(e, f, splat(0.5f));
  e = fma(e, f, splat(1.0f));
  e = fma(e, f, splat(1.0f));
  // The low bits of `shifted` are n: add it to the exponent.
  const Uints scaled = reinterpret_cast<Uints>(e) + (reinterpret_cast<Uints>(shifted) << 23);
  const Floats result = x < lowest ? Floats{} : reinterpret_cast<Floats>(scaled);
  return x == x ? result : x;
}

inline float exp(float x) { return exp(splat(x))[0]; }

// To 2 ulp: 1 - 2 / (e^2|x| + 1) with the sign of x, and near 0, where that cancels, Cephes' polynomial.
inline Floats tanh(Floats x) {
  const Floats size = x < 0.0f ? -x : x, square = x * x;
  const Floats far = 1.0f - 2.0f / (exp(size + size) + 1.0f);
  Floats near = splat(-5.70498872745e-3f);
  near = fma(near, square, splat(2.06390887954e-2f));
  near = fma(near, square, splat(-5.37397155531e-2f));
  near = fma(near, square, splat(1.33314422036e-1f));
  near = fma(near, square, splat(-3.33332819422e-1f));
  near = fma(near * square, x, x);
  return size < 0.625f ? near : (x < 0.0f ? -far : far);
}

}  // namespace pageturner
