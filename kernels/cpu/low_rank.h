// What adapters add to a product with float weights: y += B (A x) for each row that has one (Hu et al. 2021, "LoRA").
//
// Rows of one adapter are gathered, so that its A is taken through all of them while it lies in cache.
// reference_low_rank.ReferenceLowRankOps defines the result. An element of A x is sixteen sums, each in ascending order of inputs, folded
// in one way; an output is one chain over ranks. So a row's bits depend on nothing but the row and its adapter.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "rows.h"
#include "rows_by_adapter.h"
#include "simd.h"
#include "team.h"

namespace pageturner {

// One adapter's part in one product, in float32, as PackedLowRank. Mirrored by ctypes in low_rank.py, as the next.
struct LowRank {
  const float* a;             // [ranks of all parts, in_features]; null: it adds nothing to this product
  const float* b[PARTS];      // [tiles of 16 outputs][rank][16], scaled; null: it adds nothing to this part
  std::int32_t ranks[PARTS];  // of the parts, 0 where b is null

  int rank() const { return ranks[0] + ranks[1] + ranks[2]; }
  int first_rank(int part) const { return (part > 0 ? ranks[0] : 0) + (part > 1 ? ranks[1] : 0); }
};

// Calls f with 1 .. MOST as a constant.
template <int MOST, class F>
void with_constant(int count, const F& f) {
  if constexpr (MOST > 1)
    if (count < MOST) return with_constant<MOST - 1>(count, f);
  f(std::integral_constant<int, MOST>{});
}

// to[row * stride + i] = a[i] . x[row], both `size` long, for ROWS rows and RANKS of a.
template <int ROWS, int RANKS>
void dots(const float* a, const float* x, int size, float* to, std::int64_t stride) {
  Sixteen sums[ROWS][RANKS];
  const auto add = [&](int at, int part, int count) {
    Floats weights[RANKS];
    for (int i = 0; i < RANKS; i++) weights[i] = load(a + std::int64_t{i} * size + at, count);
    for (int row = 0; row < ROWS; row++) {
      const Floats values = load(x + std::int64_t{row} * size + at, count);
      for (int i = 0; i < RANKS; i++) sums[row][i].part[part] = fma(weights[i], values, sums[row][i].part[part]);
    }
  };
  const int whole = size / LANES * LANES;
  for (int at = 0; at < whole; at += LANES)
    for (int part = 0; part < LANES / WIDTH; part++) add(at + part * WIDTH, part, WIDTH);
  for (int part = 0; whole + part * WIDTH < size; part++)
    add(whole + part * WIDTH, part, std::min(WIDTH, size - whole - part * WIDTH));
  for (int row = 0; row < ROWS; row++)
    for (int i = 0; i < RANKS; i++) to[row * stride + i] = sums[row][i].sum();
}

// As many sums at a time as registers hold.
constexpr int DOT_ROWS = WIDTH == LANES ? 4 : 2, DOT_RANKS = WIDTH == LANES ? 4 : 2;

// to[row * stride + 0 .. rank) = A x[row].
inline void multiply_a(const float* a, int rank, const float* x, int rows, int size, float* to, std::int64_t stride) {
  for (int row = 0; row < rows; row += DOT_ROWS)
    with_constant<DOT_ROWS>(rows - row, [&](auto num_rows) {
      for (int i = 0; i < rank; i += DOT_RANKS)
        with_constant<DOT_RANKS>(rank - i, [&](auto num_ranks) {
          dots<num_rows, num_ranks>(a + std::int64_t{i} * size, x + std::int64_t{row} * size, size,
                                    to + row * stride + i, stride);
        });
    });
}

// to[0 .. count) += B u, of a tile [rank][16], with count <= 16.
template <class T>
void add_tile(const float* tile, const float* u, int rank, T* to, int count) {
  for (int lane = 0; lane < count; lane += WIDTH) {
    Floats sum = {};
    for (int i = 0; i < rank; i++) sum = fma(splat(u[i]), load(tile + i * LANES + lane), sum);
    const int some = std::min(WIDTH, count - lane);
    store(to + lane, load(to + lane, some) + sum, some);
  }
}

// One product's parts of adapters, for rows of floats. Mirrored by ctypes in low_rank.py.
struct LowRankCall {
  const void* rows;  // [num_rows, in_features], rows row_stride apart
  void* output;      // [num_rows, ...], rows output_stride apart: what is added to
  const std::int32_t* of_row;
  const LowRank* const* adapters;  // [num_adapters]
  std::int64_t row_stride, output_stride;
  std::int32_t starts[PARTS + 1];  // of the parts in the outputs, and the end
  std::int32_t num_rows, num_adapters, in_features, rank;
};

template <class T>
void add_low_rank(Team& team, const LowRankCall& call) {
  RowsByAdapter by_adapter;
  by_adapter.sort(call.of_row, call.num_rows, call.num_adapters);
  const std::int32_t* rows = by_adapter.rows();
  std::vector<float> u(std::size_t(by_adapter.num_rows()) * call.rank);  // A x, in the order of `rows`
  team.for_each(by_adapter.pieces().size(), [&](std::int64_t index) {
    const RowsByAdapter::Run& piece = by_adapter.pieces()[index];
    const LowRank& low_rank = *call.adapters[piece.adapter];
    if (!low_rank.a) return;
    float* x = scratch(std::size_t(piece.size()) * call.in_features);
    for (int i = 0; i < piece.size(); i++) {
      const T* from = static_cast<const T*>(call.rows) + rows[piece.begin + i] * call.row_stride;
      float* to = x + std::int64_t{i} * call.in_features;
      for_each_vector(call.in_features, [&](int at, int n) { store(to + at, load(from + at, n), n); });
    }
    multiply_a(low_rank.a, low_rank.rank(), x, piece.size(), call.in_features, u.data() + piece.begin * call.rank,
               call.rank);
  });
  // A tile of B is taken through all rows of its adapter while it lies in cache.
  for (int part = 0; part < PARTS; part++) {
    const int size = call.starts[part + 1] - call.starts[part];
    T* output = static_cast<T*>(call.output) + call.starts[part];
    team.for_each_stretch((size + LANES - 1) / LANES, 1, [&](std::int64_t tile, std::int64_t end) {
      for (const RowsByAdapter::Run& run : by_adapter.runs()) {
        const LowRank& low_rank = *call.adapters[run.adapter];
        if (!low_rank.b[part]) continue;
        const int rank = low_rank.ranks[part];
        for (std::int64_t at = tile; at < end; at++)
          for (int i = run.begin; i < run.end; i++)
            add_tile(low_rank.b[part] + at * LANES * rank, u.data() + std::int64_t{i} * call.rank + low_rank.first_rank(part),
                     rank, output + rows[i] * call.output_stride + at * LANES, int(std::min<std::int64_t>(LANES, size - at * LANES)));
      }
    });
  }
}

}  // namespace pageturner
