// What lies between two products of a decoder, joined to the one before or behind it: its values go from one
// to the other as int8 in cache, and never as float32 through memory.
#pragma once

#include <type_traits>

#include "products.h"
#include "quantise.h"
#include "rows.h"
#include "team.h"

namespace pageturner {

// Mirrored by ctypes in quantised_ops.py.
struct NormRows {
  const float* hidden;    // [num_rows, size], rows hidden_stride apart
  const float* residual;  // [num_rows, size] contiguous, or null
  const float* norm;      // [size]
  float* summed;          // [num_rows, size] contiguous (unused without residual); it may be residual
  std::int64_t hidden_stride;
  std::int32_t num_rows, size;
  float eps;
};

// summed = residual + hidden; codes = the norm of it (or of hidden), quantised in groups.
inline void norm_and_quantise(Team& team, const NormRows& args, int group, void* codes) {
  const std::int64_t bytes = code_row_bytes(args.size, group);
  for_each_row(team, args.num_rows, args.size, [&](std::int64_t row) {
    const float* hidden = args.hidden + row * args.hidden_stride;
    if (args.residual) {
      float* summed = args.summed + row * args.size;
      add_row(args.residual + row * args.size, hidden, args.size, summed);
      hidden = summed;
    }
    float* normed = scratch(args.size);
    norm_row(hidden, args.norm, args.eps, args.size, normed);
    quantise_row(normed, args.size, group, static_cast<char*>(codes) + row * bytes);
  });
}

// gated = silu(gate) * up, quantised in groups, of the product with gate_up: gate's outputs, then up's. `group`
// divides the number of either. A piece of work computes whole groups, so that nothing waits for the rows.
template <class Addend = NoAddend>
void gated_product(Team& team, const PackedWeight& gate_up, const void* codes, int rows, int group, void* gated,
                   const Addend& addend = {}) {
  const std::int64_t inner = gate_up.out_features / 2, up_tiles = inner / LANES;
  const std::int64_t gated_bytes = code_row_bytes(inner, group);
  const int tiles = group / LANES;
  for_each_piece(team, gate_up, rows, 2 * group, [&](std::int64_t begin, int count, std::int64_t slice, std::int64_t end) {
    // Several slices of a few rows at once, where something is added: what that is is found once for all of them.
    const int together = std::is_same_v<Addend, NoAddend> || count > 64 ? 1 : TILES_TOGETHER / tiles;
    const int width = together * group;
    float* memory = scratch(tile_scratch(gate_up) + 2 * std::size_t(count) * width);
    float* gate = memory + tile_scratch(gate_up);
    float* up = gate + std::int64_t{count} * width;
    const char* first = static_cast<const char*>(codes) + begin * gate_up.code_row_bytes();
    while (slice < end) {
      const std::int64_t last = std::min(end, slice + together), tile = slice * tiles, end_tile = last * tiles;
      for (std::int64_t at = tile; at < end_tile; at++) {
        const std::int64_t to = (at - tile) * LANES;
        multiply_tile(gate_up, open_tile(gate_up, at, memory), first, count, gate + to, width);
        multiply_tile(gate_up, open_tile(gate_up, up_tiles + at, memory), first, count, up + to, width);
      }
      addend(begin, count, tile, end_tile, gate, width);
      addend(begin, count, up_tiles + tile, up_tiles + end_tile, up, width);
      for (int row = 0; row < count; row++) {
        char* to = static_cast<char*>(gated) + (begin + row) * gated_bytes + slice * code_row_bytes(group, group);
        float* values = gate + row * width;
        const int some = int(last - slice) * group;
        gate_row(values, up + row * width, some, values);
        quantise_row(values, some, group, to);
      }
      slice = last;
    }
  });
}

}  // namespace pageturner
