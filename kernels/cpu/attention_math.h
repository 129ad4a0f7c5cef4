// What attention does with the numbers of one step, by this machine's instructions: scores = rows @ keys,
// weights = exp(scores), values += weights @ values.
//
// FloatMath multiplies in float32 whatever the pool holds. PairMath is for pools of bf16 on machines that
// multiply pairs of them (vdpbf16ps): rows and weights are rounded to bf16 too, sums stay float32, and a
// multiplication does twice as much. Codes are exact in bf16, and multiplied as they are: their scales are
// factors of a key's score and of a value's weight. Either takes dims and keys in ascending order, for every row
// alike, so that neither the count of rows nor the tiling of registers changes a bit of a row.
#pragma once

#include <algorithm>
#include <type_traits>

#include "codes.h"
#include "simd.h"

namespace pageturner {

constexpr int STEP_TILES = 4;
constexpr int STEP = STEP_TILES * LANES;
constexpr int MICRO_ROWS = 6;  // packed rows that are computed together, as many as registers hold sums for

// The scales of a step's keys and values, of a pool of codes.
template <class T, bool = is_code<T>>
struct StepScales {};
template <class T>
struct StepScales<T, true> {
  const bf16* key_scales[STEP_TILES];
  const bf16* value_scales[STEP_TILES];
};

// The keys of one step and the values beside them, as four tiles of sixteen.
template <class T>
struct KeyStep : StepScales<T> {
  int begin, end;  // key positions; end is cut at the last key that the item sees
  const T* keys[STEP_TILES];
  const T* values[STEP_TILES];

  const T* value(int key, int head_dim) const { return values[key / LANES] + key % LANES * head_dim; }
};

// VECTORS vectors of each of ROWS rows, row_size apart.
template <int ROWS, int VECTORS>
struct RowSums {
  Floats sum[ROWS][VECTORS];

  void load_from(const float* rows, int row_size) {
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) sum[r][v] = load(rows + r * row_size + v * WIDTH);
  }
  void store_to(float* rows, int row_size) const {
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) store(rows + r * row_size + v * WIDTH, sum[r][v]);
  }
};

// f(first dim, constant count of vectors) over all dims, MOST vectors at a time, then one by one.
template <int MOST, class F>
void for_each_dims(int head_dim, const F& f) {
  int d = 0;
  for (; d + MOST * WIDTH <= head_dim; d += MOST * WIDTH) f(d, std::integral_constant<int, MOST>{});
  for (; d < head_dim; d += WIDTH) f(d, std::integral_constant<int, 1>{});
}

// What a step reads is fetched while the one before it is computed, piece by piece: all at once it would hold
// up the loads behind it.
inline void fetch(const void* from) { __builtin_prefetch(from, 0, 2); }

// Sixteens of T in a cache line.
template <class T>
constexpr int LINE = 64 / (LANES * int(sizeof(T)));

inline void add_totals(const Floats (&weights)[STEP / WIDTH], float* totals) {
  for (int i = 0; i < STEP / WIDTH; i++) {
    float* total = totals + i * WIDTH % LANES;
    store(total, load(total) + weights[i]);
  }
}

template <class T>
struct FloatMath {
  static constexpr const char* NAME = "float32";
  using Number = float;  // of rows and weights

  // Of sums a row, beside those of keys or values and one of the row: 6 x 4 of 32 registers, 6 x 2 of 16.
  static constexpr int VECTORS = WIDTH == LANES ? 4 : 2;

  // The scores of ROWS rows [ROWS][head_dim] and the keys of a step.
  template <int ROWS>
  static void score(const KeyStep<T>& step, const KeyStep<T>& next, int head_dim, const float* rows,
                    float (&scores)[ROWS][STEP]) {
    const bool fetching = &next != &step;
    for (int first = 0; first < STEP; first += VECTORS * WIDTH) {
      RowSums<ROWS, VECTORS> scored{};
      for (int d = 0; d < head_dim; d++) {
        Floats key[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
          const int tile = (first + v * WIDTH) / LANES, lane = (first + v * WIDTH) % LANES;
          key[v] = load(step.keys[tile] + d * LANES + lane);
          if (fetching && !lane && (!is_code<T> || d % LINE<T> == 0)) fetch(next.keys[tile] + d * LANES);
        }
        for (int r = 0; r < ROWS; r++) {
          const Floats x = splat(rows[r * head_dim + d]);
          for (int v = 0; v < VECTORS; v++) scored.sum[r][v] = fma(x, key[v], scored.sum[r][v]);
        }
      }
      scored.store_to(&scores[0][first], STEP);
    }
  }

  // e^(score - anchor).
  static Floats weight(Floats score, float anchor) { return exp(score - anchor); }

  // The weights of one row, to memory, and the row's sixteen totals with them.
  static void keep(const Floats (&weights)[STEP / WIDTH], float* to, float* totals) {
    add_totals(weights, totals);
    keep(weights, to);
  }
  static void keep(const Floats (&weights)[STEP / WIDTH], float* to) {
    for (int i = 0; i < STEP / WIDTH; i++) store(to + i * WIDTH, weights[i]);
  }

  // values[r] += weights[r] @ the step's, of its keys [begin, end).
  template <int ROWS>
  static void add_values(const KeyStep<T>& step, const KeyStep<T>& next, int begin, int end, int head_dim,
                         const float (&weights)[ROWS][STEP], float* values) {
    const bool fetching = &next != &step;
    for_each_dims<VECTORS>(head_dim, [&](int d, auto vectors) {
      RowSums<ROWS, vectors> rows;
      rows.load_from(values + d, head_dim);
      for (int key = begin; key < end; key++) {
        const T* from = step.value(key, head_dim) + d;
        Floats x[vectors];
        for (int v = 0; v < vectors; v++) x[v] = load(from + v * WIDTH);
        if (fetching)
          for (int v = 0; v < vectors; v += 64 / int(WIDTH * sizeof(T)))
            fetch(next.value(key, head_dim) + d + v * WIDTH);
        for (int r = 0; r < ROWS; r++) {
          const Floats weight = splat(weights[r][key]);
          for (int v = 0; v < vectors; v++) rows.sum[r][v] = fma(weight, x[v], rows.sum[r][v]);
        }
      }
      rows.store_to(values + d, head_dim);
    });
  }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)

template <class T>
struct PairMath {
  static constexpr const char* NAME = "bfloat16 pairs";
  using Number = bf16;
  static constexpr int VECTORS = 4;

  template <int ROWS>
  static void score(const KeyStep<T>& step, const KeyStep<T>& next, int head_dim, const bf16* rows,
                    float (&scores)[ROWS][STEP]) {
    const bool fetching = &next != &step;
    RowSums<ROWS, STEP_TILES> scored{};
    for (int d = 0; d < head_dim; d += 2) {
      __m512i key[STEP_TILES];
      for (int tile = 0; tile < STEP_TILES; tile++)
        key[tile] = pairs(step.keys[tile] + d * LANES);
      if (fetching && d % LINE<T> == 0)
        for (int tile = 0; tile < STEP_TILES; tile++) fetch(next.keys[tile] + d * LANES);
      for (int r = 0; r < ROWS; r++) {
        const __m512i x = pair(rows + r * head_dim + d);
        for (int tile = 0; tile < STEP_TILES; tile++)
          scored.sum[r][tile] = dot(scored.sum[r][tile], x, key[tile]);
      }
    }
    scored.store_to(scores[0], STEP);
  }

  // 2^n times a polynomial for 2^f, |f| <= 1/2, which is off by 1e-4 where rounding to bf16 is off by 2e-3.
  static f32x16 weight(f32x16 score, float anchor) {
    constexpr float LOG2_E = 1.44269504f;
    const f32x16 power = fma(score, splat(LOG2_E), splat(-anchor * LOG2_E));
    const __m512 n = _mm512_roundscale_ps(__m512(power), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const f32x16 f = power - f32x16(n);
    f32x16 e = splat(EXP2[3]);
    for (int i = 2; i >= 0; i--) e = fma(e, f, splat(EXP2[i]));
    return f32x16(_mm512_scalef_ps(__m512(e), n));
  }

  // The total is of the weights as they are rounded, so that those of a row still add up to one.
  static void keep(const f32x16 (&weights)[STEP_TILES], bf16* to, float* totals) {
    f32x16 total = load(totals);
    for (int tile = 0; tile < STEP_TILES; tile += 2) {
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(__m512(weights[tile + 1]), __m512(weights[tile]));
      _mm512_storeu_si512(to + tile * LANES, both);
      total = dot(total, both, _mm512_set1_epi32(0x3f803f80));  // pairs of 1
    }
    store(totals, total);
  }
  static void keep(const f32x16 (&weights)[STEP_TILES], bf16* to) {
    for (int tile = 0; tile < STEP_TILES; tile += 2)
      _mm512_storeu_si512(to + tile * LANES,
                          (__m512i)_mm512_cvtne2ps_pbh(__m512(weights[tile + 1]), __m512(weights[tile])));
  }

  // Pairs of keys start at even ones. One of a pair that no row sees may be NaN: a zero stands for it.
  template <int ROWS>
  static void add_values(const KeyStep<T>& step, const KeyStep<T>& next, int begin, int end, int head_dim,
                         const bf16 (&weights)[ROWS][STEP], float* values) {
    const bool fetching = &next != &step;
    for_each_dims<VECTORS>(head_dim, [&](int d, auto vectors) {
      RowSums<ROWS, vectors> rows;
      rows.load_from(values + d, head_dim);
      for (int tile = begin / LANES; tile * LANES < end; tile++) {
        const T* from = step.values[tile] + d;
        const T* ahead = next.values[tile] + d;
        const int first = std::max(0, begin - tile * LANES), last = std::min(LANES, end - tile * LANES);
        for (int key = first & ~1; key < last; key += 2) {
          const T* low = key < first ? ZEROS : from + key * head_dim;
          const T* high = key + 1 < last ? from + (key + 1) * head_dim : ZEROS;
          __m512i x[vectors];
          for (int v = 0; v < vectors; v++) x[v] = pairs(low + v * LANES, high + v * LANES);
          if (fetching)
            for (int v = 0; v < vectors; v += LINE<T>) {
              fetch(ahead + key * head_dim + v * LANES);
              fetch(ahead + (key + 1) * head_dim + v * LANES);
            }
          for (int r = 0; r < ROWS; r++) {
            const __m512i weight = pair(&weights[r][tile * LANES + key]);
            for (int v = 0; v < vectors; v++) rows.sum[r][v] = dot(rows.sum[r][v], weight, x[v]);
          }
        }
      }
      rows.store_to(values + d, head_dim);
    });
  }

 private:
  static constexpr float EXP2[] = {1.0f, 0.69328296f, 0.242211f, 0.055008873f};
  alignas(64) static constexpr T ZEROS[VECTORS * LANES] = {};

  static f32x16 dot(f32x16 sum, __m512i a, __m512i b) {
    return f32x16(_mm512_dpbf16_ps(__m512(sum), (__m512bh)a, (__m512bh)b));
  }
  // Two neighbours in every lane.
  static __m512i pair(const bf16* from) {
    std::int32_t both;
    std::memcpy(&both, from, sizeof both);
    return _mm512_set1_epi32(both);
  }
  // Sixteen numbers and sixteen more, from where they follow them or not -> pairs of one of each.
  static __m512i pairs(const bf16* both) { return zipped(_mm512_loadu_si512(both)); }
  static __m512i pairs(const bf16* first, const bf16* second) {
    const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first)));
    return zipped(_mm512_inserti64x4(low, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second)), 1));
  }
  static __m512i zipped(__m512i both) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                           6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, both);
  }
  // A code says all in its upper half as a float.
  template <class Code>
  static __m512i pairs(const Code* both) { return pairs(both, both + LANES); }
  template <class Code>
  static __m512i pairs(const Code* first, const Code* second) {
    return _mm512_or_si512(_mm512_srli_epi32(__m512i(load(first)), 16), __m512i(load(second)));
  }
};

#endif

template <class T>
struct MathOf {
  using type = FloatMath<T>;
};
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
template <>
struct MathOf<bf16> {
  using type = PairMath<bf16>;
};
template <>
struct MathOf<i8> {
  using type = PairMath<i8>;
};
template <>
struct MathOf<f8> {
  using type = PairMath<f8>;
};
#endif

}  // namespace pageturner
