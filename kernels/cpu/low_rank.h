// What adapters add to a product: y += B (A x) for each row that has one (Hu et al. 2021, "LoRA").
//
// A step holds rows of several adapters and of none. Rows of one adapter are gathered, so that its A is taken through
// all of them while it lies in cache (Chen et al. 2023, "Punica"); B is added to the outputs of a product while they do.
// reference.add_low_rank defines the result. An element of A x is sixteen sums, each in ascending order of inputs, folded
// in one way; an output is one chain over ranks. So a row's bits depend on nothing but the row and its adapter.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "products.h"
#include "simd.h"
#include "team.h"

namespace pageturner {

constexpr int PARTS = 3;

// One adapter's part in one product. The outputs are up to PARTS stretches one behind the other, such as q, k and v, each
// with an A and a B of its own, in float32 or bfloat16. Mirrored by ctypes in low_rank.py, as the next.
struct LowRank {
  const void* a;              // [ranks of all parts, in_features]; null: it adds nothing to this product
  const void* b[PARTS];       // [tiles of 16 outputs][rank][16], scaled; null: it adds nothing to this part
  std::int32_t ranks[PARTS];  // of the parts, 0 where b is null
  std::int32_t is_narrow;     // whether a and b are in bfloat16

  int rank() const { return ranks[0] + ranks[1] + ranks[2]; }
  int first_rank(int part) const { return (part > 0 ? ranks[0] : 0) + (part > 1 ? ranks[1] : 0); }
};

struct AdapterLayer {
  LowRank qkv, out, gate_up, down;
};

// Calls f with 1 .. MOST as a constant.
template <int MOST, class F>
void with_constant(int count, const F& f) {
  if constexpr (MOST > 1)
    if (count < MOST) return with_constant<MOST - 1>(count, f);
  f(std::integral_constant<int, MOST>{});
}

// to[row * stride + i] = a[i] . x[row], both `size` long, for ROWS rows and RANKS of a.
template <int ROWS, int RANKS, class W>
void dots(const W* a, const float* x, int size, float* to, std::int64_t stride) {
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

// to[row][0 .. rank) = A x[row].
template <class W>
void multiply_a(const W* a, int rank, const float* x, int rows, int size, float* const* to) {
  float found[DOT_ROWS * DOT_RANKS];
  for (int row = 0; row < rows; row += DOT_ROWS)
    with_constant<DOT_ROWS>(rows - row, [&](auto num_rows) {
      for (int i = 0; i < rank; i += DOT_RANKS)
        with_constant<DOT_RANKS>(rank - i, [&](auto num_ranks) {
          const char* ahead = reinterpret_cast<const char*>(a + std::int64_t{i + DOT_RANKS} * size);
          if (!row)
            for (std::size_t byte = 0; byte < DOT_RANKS * size * sizeof(W); byte += 64) __builtin_prefetch(ahead + byte, 0, 2);
          dots<num_rows, num_ranks>(a + std::int64_t{i} * size, x + std::int64_t{row} * size, size, found, DOT_RANKS);
          for (int k = 0; k < num_rows; k++) std::copy_n(found + k * DOT_RANKS, int(num_ranks), to[row + k] + i);
        });
    });
}

// to[0 .. count) += B u of the outputs from `at` on, a multiple of 16, with count <= 16.
template <class W, class T>
void add_tile(const W* b, std::int64_t at, const float* u, int rank, T* to, int count) {
  const W* tile = b + at * rank;
  // Several adapters are read by turns, tile after tile: too many streams for the processor's own prefetching.
  const char* ahead = reinterpret_cast<const char*>(tile + 2 * LANES * rank);
  for (std::size_t byte = 0; byte < LANES * rank * sizeof(W); byte += 64) __builtin_prefetch(ahead + byte, 0, 2);
  for (int lane = 0; lane < count; lane += WIDTH) {
    Floats sum = {};
    for (int i = 0; i < rank; i++) sum = fma(splat(u[i]), load(tile + i * LANES + lane), sum);
    const int some = std::min(WIDTH, count - lane);
    store(to + lane, load(to + lane, some) + sum, some);
  }
}

template <class T>
void add_tile(const LowRank& low_rank, int part, std::int64_t at, const float* u, T* to, int count) {
  const int rank = low_rank.ranks[part];
  u += low_rank.first_rank(part);
  if (low_rank.is_narrow)
    add_tile(static_cast<const bf16*>(low_rank.b[part]), at, u, rank, to, count);
  else
    add_tile(static_cast<const float*>(low_rank.b[part]), at, u, rank, to, count);
}

// The rows of a step by adapter.
class AdapterRows {
 public:
  // Rows of one adapter that are taken through its A together.
  struct Piece {
    std::int32_t adapter, begin, end;
  };

  // of_row: [num_rows] adapters below num_adapters, -1 for none. It must outlive this.
  void sort(const std::int32_t* of_row, int num_rows, int num_adapters) {
    adapters = of_row;
    starts.assign(num_adapters + 1, 0);
    for (int row = 0; row < num_rows; row++)
      if (of_row[row] >= 0) starts[of_row[row] + 1]++;
    for (int i = 0; i < num_adapters; i++) starts[i + 1] += starts[i];
    sorted.resize(starts[num_adapters]);
    pieces.clear();
    for (int i = 0; i < num_adapters; i++)
      for (int begin = starts[i]; begin < starts[i + 1]; begin += TOGETHER)
        pieces.push_back({i, begin, std::min(begin + TOGETHER, starts[i + 1])});
    for (int row = 0; row < num_rows; row++)
      if (of_row[row] >= 0) sorted[starts[of_row[row]]++] = row;
  }

  const std::int32_t* of_row() const { return adapters; }
  const std::vector<std::int32_t>& rows() const { return sorted; }

  // u[row * stride ..] = A x for every row of an adapter. find(adapter) is its LowRank, put(row, to) writes the row's
  // `size` values.
  template <class Find, class Put>
  void shrink(Team& team, int size, const Find& find, const Put& put, float* u, std::int64_t stride) const {
    team.for_each(pieces.size(), [&](std::int64_t index) {
      const Piece& piece = pieces[index];
      const LowRank& low_rank = find(piece.adapter);
      if (!low_rank.a) return;
      const int count = piece.end - piece.begin;
      float* x = scratch(std::size_t(count) * size);
      float* to[TOGETHER];
      for (int i = 0; i < count; i++) {
        const std::int64_t row = sorted[piece.begin + i];
        put(row, x + std::int64_t{i} * size);
        to[i] = u + row * stride;
      }
      if (low_rank.is_narrow)
        multiply_a(static_cast<const bf16*>(low_rank.a), low_rank.rank(), x, count, size, to);
      else
        multiply_a(static_cast<const float*>(low_rank.a), low_rank.rank(), x, count, size, to);
    });
  }

 private:
  static constexpr int TOGETHER = 16;

  const std::int32_t* adapters = nullptr;
  std::vector<std::int32_t> starts, sorted;
  std::vector<Piece> pieces;
};

// A row as its codes have it: what the product itself multiplies.
template <int GROUP>
void dequantise_row(const CodeGroup<GROUP>* from, int size, float* to) {
  for (int i = 0; i < size; i += GROUP, from++)
    for (int k = 0; k < GROUP; k += WIDTH) {
      Bytes codes;
      std::memcpy(&codes, from->codes + k, sizeof codes);
      store(to + i + k, from->scale * __builtin_convertvector(__builtin_convertvector(codes, Ints), Floats));
    }
}

// The adapters of one step of the whole forward.
class StepAdapters {
 public:
  // adapters: each with its layers. of_row: as AdapterRows. rank: the most of one adapter in one product.
  void begin(const AdapterLayer* const* adapters, int num_adapters, const std::int32_t* of_row, int num_rows, int rank) {
    this->adapters = adapters;
    this->num_adapters = num_adapters;
    this->rank = rank;
    if (!num_adapters) return;
    by_adapter.sort(of_row, num_rows, num_adapters);
    u.resize(std::max(u.size(), std::size_t(num_rows) * rank));
  }

  // From here on the rows are these alone, in this order.
  void pick(const std::int64_t* rows, int num_rows) {
    if (!num_adapters) return;
    picked.resize(num_rows);
    for (int i = 0; i < num_rows; i++) picked[i] = by_adapter.of_row()[rows[i]];
    by_adapter.sort(picked.data(), num_rows, num_adapters);
    u.resize(std::max(u.size(), std::size_t(num_rows) * rank));
  }

  explicit operator bool() const { return num_adapters; }

  // For `product` and `gated_product`: adds to 16 outputs of some rows.
  struct Addend {
    const StepAdapters& step;
    int layer;
    LowRank AdapterLayer::*which;
    std::array<int, PARTS> parts;  // outputs of each, a multiple of 16

    void operator()(std::int64_t begin, int count, std::int64_t tile, float* to, std::int64_t stride) const {
      int part = 0;
      for (; tile * LANES >= parts[part]; part++) tile -= parts[part] / LANES;
      for (int i = 0; i < count; i++) {
        const std::int64_t row = begin + i;
        const std::int32_t adapter = step.by_adapter.of_row()[row];
        if (adapter < 0) continue;
        const LowRank& low_rank = step.adapters[adapter][layer].*which;
        if (low_rank.b[part])
          add_tile(low_rank, part, tile * LANES, step.u.data() + row * step.rank, to + i * stride, LANES);
      }
    }
  };

  // Multiplies the rows, as `codes` have them for the weight, by each adapter's A of this product.
  Addend addend(Team& team, int layer, LowRank AdapterLayer::*which, const PackedWeight& weight, const void* codes,
                const std::array<int, PARTS>& parts) {
    const auto find = [&](int adapter) -> const LowRank& { return adapters[adapter][layer].*which; };
    const auto put = [&](std::int64_t row, float* to) {
      const char* from = static_cast<const char*>(codes) + row * weight.code_row_bytes();
      if (weight.group == 32)
        dequantise_row(reinterpret_cast<const CodeGroup<32>*>(from), weight.in_features, to);
      else
        dequantise_row(reinterpret_cast<const CodeGroup<16>*>(from), weight.in_features, to);
    };
    by_adapter.shrink(team, weight.in_features, find, put, u.data(), rank);
    return {*this, layer, which, parts};
  }

 private:
  const AdapterLayer* const* adapters = nullptr;
  int num_adapters = 0, rank = 0;
  AdapterRows by_adapter;
  std::vector<std::int32_t> picked;
  std::vector<float> u;  // [rows, rank]: A x of the product at hand
};

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
  AdapterRows by_adapter;
  by_adapter.sort(call.of_row, call.num_rows, call.num_adapters);
  std::vector<float> u(std::size_t(call.num_rows) * call.rank);
  const auto find = [&](int adapter) -> const LowRank& { return *call.adapters[adapter]; };
  const auto put = [&](std::int64_t row, float* to) {
    const T* from = static_cast<const T*>(call.rows) + row * call.row_stride;
    for_each_vector(call.in_features, [&](int i, int n) { store(to + i, load(from + i, n), n); });
  };
  by_adapter.shrink(team, call.in_features, find, put, u.data(), call.rank);
  const std::vector<std::int32_t>& rows = by_adapter.rows();
  for_each_row(team, rows.size(), call.starts[PARTS], [&](std::int64_t index) {
    const std::int64_t row = rows[index];
    const LowRank& low_rank = find(call.of_row[row]);
    for (int part = 0; part < PARTS; part++) {
      if (!low_rank.b[part]) continue;
      const int size = call.starts[part + 1] - call.starts[part];
      T* to = static_cast<T*>(call.output) + row * call.output_stride + call.starts[part];
      for (int at = 0; at < size; at += LANES)
        add_tile(low_rank, part, at, u.data() + row * call.rank, to + at, std::min(LANES, size - at));
    }
  });
}

}  // namespace pageturner
