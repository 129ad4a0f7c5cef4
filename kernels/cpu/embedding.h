// Rows of a weight in groups, as float32: what an embedding gives for token ids. packed.rows_of defines it.
#pragma once

#include "products.h"

namespace pageturner {

// Scales and offsets of one tile are read where they lie, one output's out of sixteen.
inline float one_scale(const PackedWeight& weight, const std::uint8_t* scales, std::int64_t index) {
  if (weight.float32_scales) return reinterpret_cast<const float*>(scales)[index];
  f16 half[WIDTH] = {reinterpret_cast<const f16*>(scales)[index]};
  return load(half)[0];
}

inline void unpack_row(const PackedWeight& weight, std::int64_t output, float* to) {
  const std::uint8_t* tile = weight.tiles + output / LANES * weight.tile_bytes;
  const std::uint8_t* scales = tile + weight.codes_bytes;
  const std::uint8_t* offsets = scales + weight.scales_bytes;
  const int lane = output % LANES, chunks = weight.group / CHUNK;
  for (int group = 0; group < weight.groups(); group++) {
    const float scale = one_scale(weight, scales, group * LANES + lane);
    const float offset = weight.has_offsets ? one_scale(weight, offsets, group * LANES + lane) : 0.0f;
    for (int i = 0; i < weight.group; i++, to++) {
      // Of 4 bits, the chunks of a group's second half lie above those of the first.
      const int chunk = i / CHUNK, half = weight.bits == 4 ? chunks / 2 : chunks;
      const std::uint8_t* run = tile + (std::int64_t{group} * half + chunk % half) * CHUNK_BYTES;
      const std::uint8_t byte = run[lane * CHUNK + i % CHUNK];
      const int code = weight.bits == 8 ? std::int8_t(byte) : chunk < half ? byte & 15 : byte >> 4;
      *to = weight.has_offsets ? scale * float(code) + offset : scale * float(code);
    }
  }
}

// output [rows, in_features]: the weight's rows `ids`, each below out_features.
inline void embed(Team& team, const PackedWeight& weight, const std::int64_t* ids, int rows, float* output) {
  for_each_row(team, rows, 8 * weight.in_features, [&](std::int64_t row) {
    unpack_row(weight, ids[row], output + row * weight.in_features);
  });
}

}  // namespace pageturner
