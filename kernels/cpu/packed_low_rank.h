// What adapters add to a product with quantised weights: y += B (A x) for each row that has one (Hu et al. 2021,
// "LoRA"), as two quantised products. reference_low_rank.ReferencePackedLowRankOps defines the bits.
//
// A and B are weights of 8 bits in groups, and x is read as the product itself reads it: its codes are there already.
// A x becomes codes again, in groups of B's. So an adapter takes half the bytes that it has in bfloat16, and all of it is
// multiplied by the machine's own sums of codes (dot.h). A is taken through the rows of its adapter, a tile of 16 ranks a
// piece of work; B is added to the tiles of a product while they lie in cache.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "products.h"
#include "rows_by_adapter.h"
#include "team.h"

namespace pageturner {

// One adapter's part in one product. The outputs are up to PARTS stretches one behind the other, such as q, k and v,
// multiples of 16 long, each with an A and a B of its own. Mirrored by ctypes in packed_low_rank.py, as the next.
struct PackedLowRank {
  PackedWeight a;         // [ranks of all parts, in_features]; tiles null: it adds nothing to this product
  PackedWeight b[PARTS];  // [outputs, ranks] of a part, ranks a multiple of `group`; tiles null: nothing to this part
  std::int32_t group;     // of B: 8, 16 or 32

  int rank(int part) const { return b[part].tiles ? b[part].in_features : 0; }
  int first_rank(int part) const { return (part > 0 ? rank(0) : 0) + (part > 1 ? rank(1) : 0); }
  // Of A, such that no group of A x is of two of them.
  int tiles_together() const { return group > LANES ? group / LANES : 1; }
};

struct AdapterLayer {
  PackedLowRank qkv, out, gate_up, down;
};

// output[row][0 .. 16) of one tile for any number of rows, with a weight of codes of 8 bits without offsets.
template <int GROUP>
void multiply_rows(const Tile& tile, int groups, const CodeGroup<GROUP>* codes, int rows, float* output,
                   std::int64_t stride) {
  for_each_block(rows, [&](int begin, int count) {
    with_rows(count, [&](auto constant) {
      multiply_tile<constant, 8, GROUP, false>(tile, groups, codes + std::int64_t{begin} * groups,
                                               output + begin * stride, stride);
    });
  });
}

// Calls f with the group of a B as a constant.
template <class F>
void with_rank_group(int group, const F& f) {
  if (group == 8)
    f(std::integral_constant<int, 8>{});
  else if (group == 16)
    f(std::integral_constant<int, 16>{});
  else
    f(std::integral_constant<int, 32>{});
}

// to[rows[i] * stride ..] += B u[i] of tiles [begin, end); `to` is where the first one's outputs are. Meanwhile as many
// are fetched that lie behind them.
template <int GROUP>
void add_tiles(const PackedWeight& b, std::int64_t begin, std::int64_t end, const CodeGroup<GROUP>* u,
               const std::int32_t* rows, int count, float* to, std::int64_t stride) {
  const int groups = b.groups();
  for (int first = 0; first < count; first += MAX_ROWS)
    with_rows(std::min(count - first, MAX_ROWS), [&](auto some) {
      for (std::int64_t index = begin; index < end; index++) {
        Tile tile = open_tile(b, index, nullptr);
        tile.ahead = tile.codes + (end - begin) * b.tile_bytes;
        float found[some * LANES];
        multiply_tile<some, 8, GROUP, false>(tile, groups, u + std::int64_t{first} * groups, found, LANES);
        for (int i = 0; i < some; i++) {
          float* output = to + rows[first + i] * stride + (index - begin) * LANES;
          for (int lane = 0; lane < LANES; lane += WIDTH)
            store(output + lane, load(output + lane) + load(found + i * LANES + lane));
        }
      }
    });
}

// The rows of a step that have adapters, and their A x of the product at hand.
class PackedLowRankRows {
 public:
  // of_row: as RowsByAdapter. most_ranks: of one adapter in one product.
  void begin(const std::int32_t* of_row, int num_rows, int num_adapters, int most_ranks) {
    by_adapter.sort(of_row, num_rows, num_adapters);
    row_bytes = code_row_bytes(most_ranks, 8);  // the most that any group takes
    u.resize(std::max(u.size(), std::size_t(by_adapter.num_rows()) * row_bytes));
  }

  const std::int32_t* of_row() const { return by_adapter.of_row(); }

  // Multiplies every row by its adapter's A. codes: [num_rows], code_bytes each. find(adapter) is its PackedLowRank,
  // and must be for as long as `add` is called.
  template <class Find>
  void multiply(Team& team, const Find& find, const void* codes, std::int64_t code_bytes) {
    found.clear();
    for (const Run& run : by_adapter.runs()) found.push_back(&find(run.adapter));
    items.clear();
    for (const Run& piece : by_adapter.pieces()) {
      const PackedLowRank& low_rank = find(piece.adapter);
      const int tiles = low_rank.a.tiles ? (low_rank.a.out_features + LANES - 1) / LANES : 0;
      for (int tile = 0; tile < tiles; tile += low_rank.tiles_together()) items.push_back({&low_rank, &piece, tile});
    }
    team.for_each(items.size(), [&](std::int64_t index) {
      const std::size_t next = index + team.size();
      const Item& item = items[index];
      const std::uint8_t* ahead = next < items.size() ? items[next].tiles() : item.tiles();
      with_rank_group(item.low_rank->group, [&](auto group) { multiply<group>(item, codes, code_bytes, ahead); });
    });
  }

  // Adds B (A x) to tiles [tile, end) of the rows [begin, begin + count). parts: outputs of each. to: the first tile of
  // the first row, rows `stride` apart.
  void add(const std::array<int, PARTS>& parts, std::int64_t begin, int count, std::int64_t tile, std::int64_t end,
           float* to, std::int64_t stride) const {
    const std::vector<Run>& runs = by_adapter.runs();
    for (std::size_t i = 0; i < runs.size(); i++) {
      const Run some = within(runs[i], begin, begin + count);
      if (!some.size()) continue;
      std::int64_t part_begin = 0;  // its first tile
      for (int part = 0; part < PARTS; part_begin += parts[part++] / LANES) {
        const std::int64_t last = std::min(end, part_begin + parts[part] / LANES);
        if (!found[i]->b[part].tiles || last <= tile) continue;
        with_rank_group(found[i]->group, [&](auto group) {
          const PackedWeight& b = found[i]->b[part];
          const auto* of_part = codes_of<group>(runs[i], *found[i], part);
          const auto* first_row = of_part + std::int64_t{some.begin - runs[i].begin} * b.groups();
          const std::int64_t first = std::max(tile, part_begin);
          add_tiles<group>(b, first - part_begin, last - part_begin, first_row, by_adapter.rows() + some.begin,
                           some.size(), to + (first - tile) * LANES - begin * stride, stride);
        });
      }
    }
  }

 private:
  using Run = RowsByAdapter::Run;

  // Rows through some of an A's tiles.
  struct Item {
    const PackedLowRank* low_rank;
    const Run* piece;
    int tile;

    const std::uint8_t* tiles() const { return low_rank->a.tiles + tile * low_rank->a.tile_bytes; }
  };

  RowsByAdapter by_adapter;
  std::vector<const PackedLowRank*> found;  // of each run
  std::vector<Item> items;
  std::vector<char> u;  // A x of each run as codes, part after part: [rows of the run][groups of the part]
  std::int64_t row_bytes = 0;

  // Where the A x of a run lie, of one part.
  template <int GROUP>
  const CodeGroup<GROUP>* codes_of(const Run& run, const PackedLowRank& low_rank, int part) const {
    const char* begin = u.data() + run.begin * row_bytes;
    return reinterpret_cast<const CodeGroup<GROUP>*>(begin) + low_rank.first_rank(part) / GROUP * run.size();
  }

  // The part of a run that lies in rows [begin, end).
  Run within(const Run& run, std::int64_t begin, std::int64_t end) const {
    const std::int32_t* rows = by_adapter.rows();
    Run some = run;
    if (rows[run.begin] < begin) some.begin = std::lower_bound(rows + run.begin, rows + run.end, begin) - rows;
    if (rows[run.end - 1] >= end) some.end = std::lower_bound(rows + some.begin, rows + run.end, end) - rows;
    return some;
  }

  template <int GROUP>
  void multiply(const Item& item, const void* codes, std::int64_t code_bytes, const std::uint8_t* ahead) {
    const PackedWeight& a = item.low_rank->a;
    const int count = item.piece->size(), tiles = item.low_rank->tiles_together(), width = tiles * LANES;
    const std::int32_t* rows = by_adapter.rows() + item.piece->begin;
    float* products = scratch(std::size_t(count) * (width + code_bytes / sizeof(float)));
    const char* first = static_cast<const char*>(codes) + rows[0] * code_bytes;
    if (rows[count - 1] - rows[0] != count - 1) {  // not one behind the other
      char* gathered = reinterpret_cast<char*>(products + std::int64_t{count} * width);
      for (int i = 0; i < count; i++)
        std::memcpy(gathered + i * code_bytes, static_cast<const char*>(codes) + rows[i] * code_bytes, code_bytes);
      first = gathered;
    }
    for (int i = 0; i < tiles; i++) {
      Tile tile = open_tile(a, item.tile + i, nullptr);
      tile.ahead = ahead + i * a.tile_bytes;
      if (a.group == 32)
        multiply_rows(tile, a.groups(), reinterpret_cast<const CodeGroup<32>*>(first), count, products + i * LANES, width);
      else
        multiply_rows(tile, a.groups(), reinterpret_cast<const CodeGroup<16>*>(first), count, products + i * LANES, width);
    }
    quantise<GROUP>(item, products, width);
  }

  // products: [rows of the piece, width] -> codes of the parts that they are of.
  template <int GROUP>
  void quantise(const Item& item, const float* products, int width) {
    const PackedLowRank& low_rank = *item.low_rank;
    const Run& run = run_of(item.piece->adapter);
    const int begin = item.tile * LANES, end = std::min(begin + width, low_rank.a.out_features);
    for (int part = 0; part < PARTS; part++) {
      const int first = low_rank.first_rank(part), groups = low_rank.rank(part) / GROUP;
      auto* to = const_cast<CodeGroup<GROUP>*>(codes_of<GROUP>(run, low_rank, part));
      to += std::int64_t{item.piece->begin - run.begin} * groups;
      for (int at = std::max(begin, first); at < std::min(end, first + groups * GROUP); at += GROUP)
        for (int row = 0; row < item.piece->size(); row++)
          quantise_row<GROUP>(products + std::int64_t{row} * width + at - begin, GROUP,
                              to + std::int64_t{row} * groups + (at - first) / GROUP);
    }
  }

  const Run& run_of(std::int32_t adapter) const {
    const auto& runs = by_adapter.runs();
    return *std::lower_bound(runs.begin(), runs.end(), adapter,
                             [](const Run& run, std::int32_t wanted) { return run.adapter < wanted; });
  }
};

// The adapters of one step of the whole forward.
class StepAdapters {
 public:
  // adapters: each with its layers. of_row: as RowsByAdapter. most_ranks: of one adapter in one product.
  void begin(const AdapterLayer* const* adapters, int num_adapters, const std::int32_t* of_row, int num_rows,
             int most_ranks) {
    this->adapters = adapters;
    this->num_adapters = num_adapters;
    this->most_ranks = most_ranks;
    if (num_adapters) rows.begin(of_row, num_rows, num_adapters, most_ranks);
  }

  // From here on the rows are these alone, in this order.
  void pick(const std::int64_t* picked_rows, int num_rows) {
    if (!num_adapters) return;
    picked.resize(num_rows);
    for (int i = 0; i < num_rows; i++) picked[i] = rows.of_row()[picked_rows[i]];
    rows.begin(picked.data(), num_rows, num_adapters, most_ranks);
  }

  explicit operator bool() const { return num_adapters; }

  // For `product` and `gated_product`: adds to tiles of outputs of some rows.
  struct Addend {
    const PackedLowRankRows& rows;
    std::array<int, PARTS> parts;  // outputs of each, a multiple of 16

    void operator()(std::int64_t begin, int count, std::int64_t tile, std::int64_t end, float* to,
                    std::int64_t stride) const {
      rows.add(parts, begin, count, tile, end, to, stride);
    }
  };

  // Multiplies the rows, as `codes` have them for the weight, by each adapter's A of this product.
  Addend addend(Team& team, int layer, PackedLowRank AdapterLayer::*which, const PackedWeight& weight,
                const void* codes, const std::array<int, PARTS>& parts) {
    const auto find = [&](int adapter) -> const PackedLowRank& { return adapters[adapter][layer].*which; };
    rows.multiply(team, find, codes, weight.code_row_bytes());
    return {rows, parts};
  }

 private:
  const AdapterLayer* const* adapters = nullptr;
  int num_adapters = 0, most_ranks = 0;
  PackedLowRankRows rows;
  std::vector<std::int32_t> picked;
};

// One product's parts of adapters, for rows of floats. Mirrored by ctypes in packed_low_rank.py.
struct PackedLowRankCall {
  const float* rows;  // [num_rows, in_features], rows row_stride apart
  float* output;      // [num_rows, ...], rows output_stride apart: what is added to
  const std::int32_t* of_row;
  const PackedLowRank* const* adapters;  // [num_adapters], not all without tiles
  std::int64_t row_stride, output_stride;
  std::int32_t parts[PARTS];  // outputs of each
  std::int32_t num_rows, num_adapters, in_features, group, most_ranks;
};

inline void add_packed_low_rank(Team& team, const PackedLowRankCall& call) {
  std::vector<char> codes(call.num_rows * code_row_bytes(call.in_features, call.group));
  quantise_rows(team, call.rows, call.row_stride, call.num_rows, call.in_features, call.group, codes.data());
  PackedLowRankRows rows;
  rows.begin(call.of_row, call.num_rows, call.num_adapters, call.most_ranks);
  rows.multiply(team, [&](int adapter) -> const PackedLowRank& { return *call.adapters[adapter]; }, codes.data(),
                code_row_bytes(call.in_features, call.group));
  const std::array<int, PARTS> parts = {call.parts[0], call.parts[1], call.parts[2]};
  team.for_each_stretch((parts[0] + parts[1] + parts[2]) / LANES, 1, [&](std::int64_t tile, std::int64_t end) {
    rows.add(parts, 0, call.num_rows, tile, end, call.output + tile * LANES, call.output_stride);
  });
}

}  // namespace pageturner
