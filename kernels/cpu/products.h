// Products of quantised rows with weights in groups. reference.ReferenceQuantisedOps.linear defines their bits:
//
//   sum = fma(scale_w * scale_x, float(sum of code products), sum), then fma(offset_w, shift_x, sum)
//
// for each group in ascending order. Only this chain is in floats, and it is the same for every element on
// every machine, so that no count of rows, tiles or threads can change a bit.
//
// A tile of 16 outputs is taken through all rows while its codes lie in the first cache; codes are unpacked
// once for up to MAX_ROWS rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "dot.h"
#include "quantise.h"
#include "rows.h"
#include "simd.h"
#include "team.h"

namespace pageturner {

// Mirrored by ctypes in quantised_ops.py; packed.py describes the bytes.
struct PackedWeight {
  const std::uint8_t* tiles;
  const float* bias;  // [out_features], or null
  std::int64_t tile_bytes, codes_bytes, scales_bytes;  // of one tile: all, its codes, its scales
  std::int32_t out_features, in_features;
  std::int32_t bits, group;     // 4 or 8; 32 or 16
  std::int32_t float32_scales;  // else float16
  std::int32_t has_offsets;

  int groups() const { return in_features / group; }
  std::int64_t code_row_bytes() const { return pageturner::code_row_bytes(in_features, group); }
};

using f32xW = Vectors<Dot::WIDTH>::Floats;

// One tile, with its scales as float32.
struct Tile {
  const std::uint8_t* codes;
  const float* scales;   // [groups][16]
  const float* offsets;  // the same
  const float* bias;     // of its outputs, or null
  int outputs;           // 16, fewer in the last one
  const std::uint8_t* ahead;  // as many bytes as a tile has, to be fetched into the second cache meanwhile
};

// Floats of scratch that `open_tile` fills.
inline std::size_t tile_scratch(const PackedWeight& weight) { return 2 * LANES * weight.groups(); }

inline const float* float_scales(const PackedWeight& weight, const std::uint8_t* from, float* scratch) {
  if (weight.float32_scales) return reinterpret_cast<const float*>(from);
  for (int i = 0; i < LANES * weight.groups(); i += WIDTH)
    store(scratch + i, load(reinterpret_cast<const f16*>(from) + i));
  return scratch;
}

// Tiles lie one behind the other and are read in this order, so that what is AHEAD bytes further on is fetched.
// The processor's own prefetching starts anew at every tile, a third as fast.
constexpr std::int64_t AHEAD = 24 << 10;

inline Tile open_tile(const PackedWeight& weight, std::int64_t index, float* scratch) {
  const std::uint8_t* tile = weight.tiles + index * weight.tile_bytes;
  const std::uint8_t* scales = tile + weight.codes_bytes;
  return {tile, float_scales(weight, scales, scratch),
          weight.has_offsets
              ? float_scales(weight, scales + weight.scales_bytes, scratch + LANES * weight.groups())
              : nullptr,
          weight.bias ? weight.bias + index * LANES : nullptr,
          int(std::min<std::int64_t>(LANES, weight.out_features - index * LANES)), tile + AHEAD};
}

constexpr int MAX_ROWS = Dot::MAX_ROWS;

// output[row][0 .. tile.outputs) for ROWS rows from `codes` on.
template <int ROWS, int BITS, int GROUP, bool OFFSETS>
void multiply_tile(const Tile& tile, int groups, const CodeGroup<GROUP>* codes, float* output,
                   std::int64_t output_stride) {
  constexpr int WIDTH = Dot::WIDTH;
  constexpr int GROUP_BYTES = LANES * GROUP * BITS / 8;
  constexpr int SCALE_BYTES = (OFFSETS ? 2 : 1) * LANES * 2;
  constexpr int FETCHED = (GROUP_BYTES + SCALE_BYTES) * WIDTH / LANES;
  const std::uint8_t* ahead = tile.ahead;
  for (int part = 0; part < LANES; part += WIDTH) {
    const int count = std::min(WIDTH, tile.outputs - part);
    if (count <= 0) return;
    const std::uint8_t* weight = tile.codes + part * CHUNK;
    f32xW totals[ROWS] = {};
    for (int group = 0; group < groups; group++) {
      const RowGroups<GROUP> rows{codes + group, groups};
      for (int byte = 0; byte < FETCHED; byte += 64) __builtin_prefetch(ahead + byte, 0, 2);
      ahead += FETCHED;
      Dot::Ints sums[ROWS];
      Dot::sums<ROWS, BITS, GROUP>(weight + std::int64_t{group} * GROUP_BYTES, rows, sums);
      const f32xW scale = load_as<f32xW>(tile.scales + group * LANES + part);
      for (int row = 0; row < ROWS; row++)
        totals[row] = fma(scale * rows[row].scale, __builtin_convertvector(sums[row], f32xW), totals[row]);
      if constexpr (OFFSETS) {
        const f32xW offset = load_as<f32xW>(tile.offsets + group * LANES + part);
        for (int row = 0; row < ROWS; row++)
          totals[row] = fma(offset, rows[row].shift - f32xW{}, totals[row]);
      }
    }
    for (int row = 0; row < ROWS; row++) {
      float values[WIDTH];
      if (tile.bias) {
        std::memcpy(values, tile.bias + part, count * sizeof(float));
        totals[row] += load_as<f32xW>(values);
      }
      float* to = output + row * output_stride + part;
      if (count == WIDTH)
        std::memcpy(to, &totals[row], sizeof totals[row]);
      else
        std::memcpy(to, &totals[row], count * sizeof(float));
    }
  }
}

// Calls f with 1 .. MAX_ROWS as a constant.
template <class F, int ROWS = MAX_ROWS>
void with_rows(int rows, const F& f) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return with_rows<F, ROWS - 1>(rows, f);
  f(std::integral_constant<int, ROWS>{});
}

// Calls f(begin, count) over [0, rows), in as few equal blocks of at most MAX_ROWS as there can be.
template <class F>
void for_each_block(int rows, const F& f) {
  const int blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
  for (int block = 0; block < blocks; block++) {
    const int begin = std::int64_t{block} * rows / blocks;
    f(begin, int(std::int64_t{block + 1} * rows / blocks) - begin);
  }
}

// The weight's kind as constants: f(bits, group, has offsets).
template <class F>
void with_kind(const PackedWeight& weight, const F& f) {
  const auto with_offsets = [&](auto bits, auto group) {
    if (weight.has_offsets)
      f(bits, group, std::true_type{});
    else
      f(bits, group, std::false_type{});
  };
  const auto with_group = [&](auto bits) {
    if (weight.group == 32)
      with_offsets(bits, std::integral_constant<int, 32>{});
    else
      with_offsets(bits, std::integral_constant<int, 16>{});
  };
  if (weight.bits == 4)
    with_group(std::integral_constant<int, 4>{});
  else
    with_group(std::integral_constant<int, 8>{});
}

// output[row][0 .. tile.outputs) for any number of rows from `codes` on.
inline void multiply_tile(const PackedWeight& weight, const Tile& tile, const void* codes, int rows,
                          float* output, std::int64_t output_stride) {
  with_kind(weight, [&](auto bits, auto group, auto offsets) {
    const auto* first = static_cast<const CodeGroup<group>*>(codes);
    const int groups = weight.groups();
    for_each_block(rows, [&](int begin, int count) {
      with_rows(count, [&](auto constant) {
        multiply_tile<constant, bits, group, offsets>(tile, groups, first + std::int64_t{begin} * groups,
                                                      output + begin * output_stride, output_stride);
      });
    });
  });
}

// Rows that are taken through a tile in one piece of work, so that their codes stay in the second cache.
inline int rows_together(const PackedWeight& weight) {
  constexpr std::int64_t CACHE = 256 << 10;
  return std::max<std::int64_t>(MAX_ROWS, CACHE / weight.code_row_bytes());
}

// f(begin of rows, count of rows, first slice, end of slices) for all rows and all slices of the outputs,
// `width` outputs each, in pieces worth a thread.
template <class F>
void for_each_piece(Team& team, const PackedWeight& weight, int rows, int width, const F& f) {
  constexpr std::int64_t WORTH = 1 << 17;  // multiplications
  if (!rows) return;
  const int together = rows_together(weight), stretches = (rows + together - 1) / together;
  const std::int64_t slices = (weight.out_features + width - 1) / width;
  const std::int64_t a_slice = std::int64_t{width} * weight.in_features * std::min(rows, together);
  team.for_each_stretch(stretches * slices, (WORTH + a_slice - 1) / a_slice,
                        [&](std::int64_t item, std::int64_t end) {
                          while (item < end) {
                            const std::int64_t begin = item / slices * together, slice = item % slices;
                            const std::int64_t last = std::min(slices, slice + end - item);
                            f(begin, std::min<std::int64_t>(together, rows - begin), slice, last);
                            item += last - slice;
                          }
                        });
}

// What is added to some tiles of outputs while they lie in cache: nothing, or see packed_low_rank.h. Called with the
// rows, the tiles' begin and end, and where the outputs of the first of both are.
struct NoAddend {
  void operator()(std::int64_t, int, std::int64_t, std::int64_t, float*, std::int64_t) const {}
};

// Of so many, so that what is added to them is found once for all.
constexpr int TILES_TOGETHER = 8;

// codes: rows quantised in the weight's groups. output [rows, out_features], rows output_stride apart.
template <class Addend = NoAddend>
void product(Team& team, const PackedWeight& weight, const void* codes, int rows, float* output,
             std::int64_t output_stride, const Addend& addend = {}) {
  for_each_piece(team, weight, rows, LANES, [&](std::int64_t begin, int count, std::int64_t tile, std::int64_t end) {
    float* memory = scratch(tile_scratch(weight));
    const char* first = static_cast<const char*>(codes) + begin * weight.code_row_bytes();
    while (tile < end) {
      float* to = output + begin * output_stride + tile * LANES;
      const std::int64_t last = std::min(end, tile + TILES_TOGETHER);
      for (std::int64_t at = tile; at < last; at++)
        multiply_tile(weight, open_tile(weight, at, memory), first, count, to + (at - tile) * LANES, output_stride);
      addend(begin, count, tile, last, to, output_stride);
      tile = last;
    }
  });
}

}  // namespace pageturner
