// Tiles of codes: how a warp brings keys and values of a pool of codes to shared memory, and makes the numbers of
// them that the tensor cores multiply.
//
// A code is a byte, int8 or float8 e4m3 (kernels/kv_codes.py); a token's scales lie behind the codes of its head's
// part of a block (kernels/layout.py). Codes are exact in bfloat16 and in float16. They are multiplied as they are:
// a key's scale is a factor of its scores, a value's of its weights. Weights times scales may be tiny, so that values
// are multiplied in bfloat16 whatever the rows have.
//
//   pool      | 16 keys of head_dim codes .. | .. | scales .. |     one head's part of a block
//                   | cp.async, as they lie           | cp.async, zeros for tokens beyond the end
//   stage     | keys | values | key scales | value scales |         in shared memory, kStages of them
//                   | numbers_of, by 16 codes a lane
//   numbers   | keys, swizzled | values, swizzled |                 where FragmentReader reads them
#pragma once

#include "attention_tile.cuh"

constexpr int kScaleBytes = 2;        // of a bfloat16
constexpr int kChunkCodes = 16;       // of 16 bytes
constexpr int kChunkScales = 8;

// What the copies of one step of kKeys keys bring.
template <class Code, int kHeadDim, int kKeys> struct alignas(16) CodeStage {
  Code keys[kKeys * kHeadDim];
  Code values[kKeys * kHeadDim];
  bfloat16 key_scales[kKeys];
  bfloat16 value_scales[kKeys];
};

// The same as numbers of 16 bits, swizzled.
template <class T, int kHeadDim, int kKeys> struct alignas(16) CodeNumbers {
  T keys[kKeys * kHeadDim];
  bfloat16 values[kKeys * kHeadDim];
};

// Where the scale of `key`, which is in `block`, lies, in bytes from the part's first code.
template <class Code, int kHeadDim>
__device__ __forceinline__ int64_t scale_offset(const PagedSequence<Code, kHeadDim>& pages, int block, int key) {
  const int in_block = key & ((1 << pages.block_size_log2) - 1);
  return wide_product(block, pages.block_stride) + (kHeadDim << pages.block_size_log2) + in_block * kScaleBytes;
}

// Starts to copy the codes of 16 adjacent tokens. Those from num_tokens on (all, where that is 0 or less) become zeros
// and are not read.
template <class Code, int kHeadDim>
__device__ __forceinline__ void start_code_copy(Code* shared, const Code* global, int num_tokens) {
  constexpr int kChunks = kHeadDim / kChunkCodes;  // of a token
  static_assert(kTileKeys * kChunks % kWarpSize == 0, "each lane copies as much");
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int copy = 0; copy < kTileKeys * kChunks / kWarpSize; ++copy) {
    const int index = copy * kWarpSize + lane;
    cp_async_16(shared + index * kChunkCodes, global + index * kChunkCodes, index < num_tokens * kChunks);
  }
}

// The same for their scales, by lanes 0 and 1: a scale that is not there becomes 0, so that nothing comes of its key's
// score nor of its value's weight.
template <class Code>
__device__ __forceinline__ void start_scale_copy(bfloat16* shared, const Code* scales, int num_tokens) {
  const int lane = threadIdx.x % kWarpSize;
  if (lane < kTileKeys / kChunkScales) {
    const int left = num_tokens - lane * kChunkScales;
    const int count = left < 0 ? 0 : left > kChunkScales ? kChunkScales : left;
    cp_async_16_part(shared + lane * kChunkScales, scales + lane * kChunkScales * kScaleBytes, count * kScaleBytes);
  }
}

// Four codes as two pairs of numbers, exactly. An int8 is found in the bits of 128 + its lower seven, less 128 or, where
// it is negative, 256; of float16, in those of 1024 + it, once 128 is added. A float of 8 bits is moved to the place that
// its parts have in 16 bits: then the exponent lacks the difference of the biases.
template <class T, class Code> __device__ __forceinline__ void numbers_of(uint32_t (&pairs)[2], uint32_t codes);

template <> __device__ __forceinline__ void numbers_of<bfloat16, int8_code>(uint32_t (&pairs)[2], uint32_t codes) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t raised = __byte_perm(codes, 0x43434343u, i == 0 ? 0x4140 : 0x4342);
    pairs[i] = fma_pair<bfloat16>(raised & 0xff7fff7fu, 0x3f803f80u, (raised & 0xff80ff80u) ^ 0x80008000u);
  }
}

template <> __device__ __forceinline__ void numbers_of<float16, int8_code>(uint32_t (&pairs)[2], uint32_t codes) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t raised = __byte_perm(codes ^ 0x80808080u, 0x64646464u, i == 0 ? 0x4140 : 0x4342);
    pairs[i] = fma_pair<float16>(raised, 0x3c003c00u, 0xe480e480u);  // 1 and -1152
  }
}

template <> __device__ __forceinline__ void numbers_of<bfloat16, fp8_code>(uint32_t (&pairs)[2], uint32_t codes) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t high = __byte_perm(codes, 0, i == 0 ? 0x1404 : 0x3424);
    pairs[i] = fma_pair<bfloat16>((high & 0x80008000u) | (high & 0x7f007f00u) >> 4, 0x7b807b80u, 0x80008000u);  // 2^120
  }
}

template <> __device__ __forceinline__ void numbers_of<float16, fp8_code>(uint32_t (&pairs)[2], uint32_t codes) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t high = __byte_perm(codes, 0, i == 0 ? 0x1404 : 0x3424);
    pairs[i] = fma_pair<float16>((high & 0x80008000u) | (high & 0x7f007f00u) >> 1, 0x5c005c00u, 0x80008000u);  // 2^8
  }
}

// Rows of codes become swizzled rows of numbers, by kThreads threads, each from 16 codes at a time.
template <class T, class Code, int kHeadDim, int kRows, int kThreads>
__device__ __forceinline__ void make_numbers(T* numbers, const Code* codes, int thread) {
  constexpr int kChunks = kHeadDim / kChunkCodes;  // of a row
  constexpr bool kWhole = kRows * kChunks % kThreads == 0;  // else some threads have one less
#pragma unroll
  for (int turn = 0; turn < (kRows * kChunks + kThreads - 1) / kThreads; ++turn) {
    const int index = turn * kThreads + thread;
    if (!kWhole && index >= kRows * kChunks) break;
    const int row = index / kChunks, chunk = index % kChunks * 2;
    const uint4 sixteen = *reinterpret_cast<const uint4*>(codes + index * kChunkCodes);
    const uint32_t fours[4] = {sixteen.x, sixteen.y, sixteen.z, sixteen.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t low[2], high[2];
      numbers_of<T, Code>(low, fours[half * 2]);
      numbers_of<T, Code>(high, fours[half * 2 + 1]);
      *reinterpret_cast<uint4*>(numbers + swizzled<kHeadDim>(row, chunk + half)) = {low[0], low[1], high[0], high[1]};
    }
  }
}

// The scales of the keys whose columns this lane holds, of a 16 x 8 product each.
template <int kKeys>
__device__ __forceinline__ void read_scales(float (&scales)[kKeys / 4], const bfloat16* of_keys) {
#pragma unroll
  for (int column = 0; column < kKeys / 8; ++column) {
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(of_keys + column * 8 + column_of_lane());
    scales[column * 2] = __uint_as_float(pair << 16);
    scales[column * 2 + 1] = __uint_as_float(pair & 0xffff0000u);
  }
}

// Multiplies scores, or weights, by their keys' scales.
template <int kRowTiles, int kKeys>
__device__ __forceinline__ void apply_scales(float (&scores)[kRowTiles][kKeys / 8][4], const bfloat16* of_keys) {
  float scales[kKeys / 4];
  read_scales<kKeys>(scales, of_keys);
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
    for (int column = 0; column < kKeys / 8; ++column) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[tile][column][i] *= scales[column * 2 + i % 2];
    }
  }
}
