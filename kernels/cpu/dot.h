// Sums of products of codes over one group, exact in integers: `Dot` is this machine's way of making them.
//
// Dot::WIDTH outputs at once, 8 or 16, and up to Dot::MAX_ROWS rows, as many as registers hold: a weight's
// codes are unpacked once for all of them.
// A chunk is 4 inputs of WIDTH outputs, [WIDTH][4] bytes, and chunks lie 64 bytes apart (packed.py). Codes
// of 4 bits are 0 to 15, those of 8 bits -128 to 127, and a row's -127 to 127.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "quantise.h"

namespace pageturner {

constexpr int CHUNK = 4;
constexpr int CHUNK_BYTES = 64;

template <int WIDTH>
struct Vectors;
template <>
struct Vectors<16> {
  using Floats = f32x16;
  using Ints = i32x16;
  using Shorts = std::int16_t __attribute__((vector_size(64)));
};
template <>
struct Vectors<8> {
  using Floats = f32x8;
  using Ints = i32x8;
  using Shorts = std::int16_t __attribute__((vector_size(32)));
};

template <class V>
V load_as(const void* from) {
  V x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

#define PAGETURNER_INLINE __attribute__((always_inline))

// f(0), f(1) .. f(COUNT - 1) as constants, written out before the compiler looks for registers.
template <int COUNT, class F>
inline PAGETURNER_INLINE void unrolled(const F& f) {
  if constexpr (COUNT > 0) {
    unrolled<COUNT - 1>(f);
    f(std::integral_constant<int, COUNT - 1>{});
  }
}

// The same group of consecutive rows.
template <int GROUP>
struct RowGroups {
  const CodeGroup<GROUP>* first;
  std::int64_t stride;  // in groups

  const CodeGroup<GROUP>& operator[](int row) const { return first[row * stride]; }
  // The chunk in every lane.
  template <class Ints>
  Ints chunk(int row, int index) const {
    return load_as<std::int32_t>((*this)[row].codes + CHUNK * index) - Ints{};
  }
};

// f(constant index, codes [WIDTH][4]) for each chunk of a group.
template <int BITS, int GROUP, class Shorts, class F>
inline PAGETURNER_INLINE void for_each_chunk(const std::uint8_t* codes, const F& f) {
  if constexpr (BITS == 4) {
    constexpr int HALF = GROUP / CHUNK / 2;
    unrolled<HALF>([&](auto index) PAGETURNER_INLINE {
      const Shorts both = load_as<Shorts>(codes + CHUNK_BYTES * index);
      f(index, both & 0x0f0f);
      f(index + HALF, both >> 4 & 0x0f0f);
    });
  } else {
    unrolled<GROUP / CHUNK>([&](auto index) PAGETURNER_INLINE {
      f(index, load_as<Shorts>(codes + CHUNK_BYTES * index));
    });
  }
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define PAGETURNER_VNNI 16
#elif defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
#define PAGETURNER_VNNI 8
#endif

#if defined(PAGETURNER_VNNI)

// vpdpbusd: four products of unsigned and signed bytes added to a 32-bit sum. It wants the weight's codes
// unsigned: those of 8 bits are raised by 128, and the sum starts from what that adds too much.
struct Dot {
  static constexpr int WIDTH = PAGETURNER_VNNI;
  static constexpr int MAX_ROWS = WIDTH == 16 ? 8 : 6;
  static constexpr const char* NAME = WIDTH == 16 ? "avx512-vnni" : "avx-vnni";
  using Ints = Vectors<WIDTH>::Ints;
  using Shorts = Vectors<WIDTH>::Shorts;

  template <int ROWS, int BITS, int GROUP>
  static inline PAGETURNER_INLINE void sums(const std::uint8_t* codes,
                                                          const RowGroups<GROUP>& rows, Ints (&sums)[ROWS]) {
    for (int row = 0; row < ROWS; row++)
      sums[row] = BITS == 8 ? rows[row].unsigned_start - Ints{} : Ints{};
    for_each_chunk<BITS, GROUP, Shorts>(codes, [&](int index, Shorts weight) {
      if constexpr (BITS == 8) weight ^= std::int16_t(0x8080);
      for (int row = 0; row < ROWS; row++)
        sums[row] = add_products(sums[row], weight, rows.template chunk<Ints>(row, index));
    });
  }

 private:
  static Ints add_products(Ints sum, Shorts weight, Ints row) {
#if PAGETURNER_VNNI == 16
    return Ints(_mm512_dpbusd_epi32(__m512i(sum), __m512i(weight), __m512i(row)));
#elif defined(__AVXVNNI__)
    return Ints(_mm256_dpbusd_avx_epi32(__m256i(sum), __m256i(weight), __m256i(row)));
#else
    return Ints(_mm256_dpbusd_epi32(__m256i(sum), __m256i(weight), __m256i(row)));
#endif
  }
};

#elif defined(__AVX2__)

// vpmaddubsw: two products of unsigned and signed bytes as a 16-bit sum, which saturates beyond 32,767.
struct Dot {
  static constexpr int WIDTH = 8;
  static constexpr int MAX_ROWS = 6;
  static constexpr const char* NAME = "avx2";
  using Ints = Vectors<WIDTH>::Ints;
  using Shorts = Vectors<WIDTH>::Shorts;

  template <int ROWS, int BITS, int GROUP>
  static inline PAGETURNER_INLINE void sums(const std::uint8_t* codes,
                                                          const RowGroups<GROUP>& rows, Ints (&sums)[ROWS]) {
    if constexpr (BITS == 4) {
      // Eight chunks of 2 * 15 * 127 stay below 32,767: the group is widened once.
      static_assert(GROUP / CHUNK * 2 * 15 * 127 <= 32767);
      Shorts narrow[ROWS] = {};
      for_each_chunk<BITS, GROUP, Shorts>(codes, [&](int index, Shorts weight) PAGETURNER_INLINE {
        unrolled<ROWS>([&](auto row) PAGETURNER_INLINE {
          add(narrow[row], pairs(weight, __m256i(rows.template chunk<Ints>(row, index))));
        });
      });
      unrolled<ROWS>([&](auto row) PAGETURNER_INLINE { sums[row] = widened(narrow[row]); });
    } else {
      // |w| times the row with the sign of w: 2 * 128 * 127 at most, so that every pair is widened.
      unrolled<ROWS>([&](auto row) PAGETURNER_INLINE { sums[row] = Ints{}; });
      for_each_chunk<BITS, GROUP, Shorts>(codes, [&](int index, Shorts weight) PAGETURNER_INLINE {
        const Shorts size = Shorts(_mm256_abs_epi8(__m256i(weight)));
        unrolled<ROWS>([&](auto row) PAGETURNER_INLINE {
          const __m256i x = __m256i(rows.template chunk<Ints>(row, index));
          add(sums[row], widened(pairs(size, _mm256_sign_epi8(x, __m256i(weight)))));
        });
      });
    }
  }

 private:
  static Shorts pairs(Shorts weight, __m256i row) {
    return Shorts(_mm256_maddubs_epi16(__m256i(weight), row));
  }
  static Ints widened(Shorts pairs) {
    return Ints(_mm256_madd_epi16(__m256i(pairs), _mm256_set1_epi16(1)));
  }
  // At once: the compiler would rather make all products first, for which there are too few registers.
  template <class V>
  static void add(V& sum, V products) {
    sum += products;
    asm("" : "+x"(sum));
  }
};

#else

// In the compiler's vectors, two bytes of a 16-bit lane at a time: the same sums as AVX2, with the same bounds.
struct Dot {
  static constexpr int WIDTH = 8;
  static constexpr int MAX_ROWS = 4;
  static constexpr const char* NAME = "portable";
  using Ints = Vectors<WIDTH>::Ints;
  using Shorts = Vectors<WIDTH>::Shorts;

  template <int ROWS, int BITS, int GROUP>
  static inline PAGETURNER_INLINE void sums(const std::uint8_t* codes,
                                                          const RowGroups<GROUP>& rows, Ints (&sums)[ROWS]) {
    Shorts short_sums[ROWS] = {};
    for (int row = 0; row < ROWS; row++) sums[row] = Ints{};
    for_each_chunk<BITS, GROUP, Shorts>(codes, [&](int index, Shorts weight) {
      const Shorts first = low(weight), second = high(weight);
      for (int row = 0; row < ROWS; row++) {
        const Shorts x = Shorts(rows.template chunk<Ints>(row, index));
        const Shorts pairs = first * low(x) + second * high(x);
        if constexpr (BITS == 4)
          short_sums[row] += pairs;
        else
          sums[row] += widened(pairs);
      }
    });
    if constexpr (BITS == 4)
      for (int row = 0; row < ROWS; row++) sums[row] = widened(short_sums[row]);
  }

 private:
  // The lower and the upper byte of each lane, with its sign.
  static Shorts low(Shorts x) { return x << 8 >> 8; }
  static Shorts high(Shorts x) { return x >> 8; }
  static Ints widened(Shorts pairs) { return (Ints(pairs) << 16 >> 16) + (Ints(pairs) >> 16); }
};

#endif

}  // namespace pageturner
