// Attention of a warp's rows to one tile of keys: scores, online softmax, weighted sum of values.
//
// The softmax is computed in one pass over the keys (Milakov and Gimelshein 2018, arXiv:1805.02867), tile by tile
// with the weighted sum kept in registers (FlashAttention-2, Dao 2023, arXiv:2307.08691):
//
//   weight(key) = 2^(unit * score(key) - anchor)     sum = total of weights     output = total of weight * value
//
// The anchor keeps the weights in range; the result, output / sum, is the same for any. FlashAttention-2 takes the
// highest score so far, and multiplies sum and output whenever it rises. Here the anchor begins as the highest score
// of the first tile with a key that the row sees, and moves only when a score exceeds it by more than kAnchorSlack.
// That soon becomes rare: then a step costs one vote, instead of four shuffles and head_dim / 2 multiplications for
// each row tile. Each row decides for itself, so that its result does not depend on the rows beside it.
//
// A row tile is 16 rows, one mma.m16n8k16. Lane l holds of each 16 x 8 product the columns l % 4 * 2 and the next of
// two rows, l / 4 (half 0) and l / 4 + 8 (half 1):
//
//              columns 0 1     2 3     4 5     6 7            scores[tile][column / 8][half * 2 + column % 2]
//     row 0       | l 0  |  l 1  |  l 2  |  l 3  |            output[tile][dim / 8][half * 2 + dim % 2]
//     row 1       | l 4  |  l 5  |  l 6  |  l 7  |
//      ...                                                    four adjacent lanes hold a row
//     row 8       | l 0  |  l 1  |  l 2  |  l 3  |
#pragma once

#include "sequence.cuh"

constexpr int kHalves = 2;  // rows of a 16 x 8 product that a lane holds

// The score of a key that a row does not see: minus infinity, so that its weight is 0 whatever the anchor.
__device__ __forceinline__ float masked_score() { return __uint_as_float(0xff800000u); }

// By how many powers of two a score may exceed the anchor. So the largest weight of a row is at most 2^8, far below
// float16's end at 2^16. It is at least 1, since the anchor is the score of one of the keys: what float16 cuts off
// below 2^-14 is small beside it.
constexpr float kAnchorSlack = 8.0f;

// Turns scores (q . k) into powers of two: unit * capped(score).
template <bool kSoftcap> struct ScoreScale {
  float inside;  // factor of the score inside the tanh
  float unit;    // above 0, so that the highest score has the highest weight

  __device__ __forceinline__ explicit ScoreScale(const AttentionArguments& arguments)
      : inside(kSoftcap ? arguments.scale / arguments.softcap : 1.0f),
        unit((kSoftcap ? arguments.softcap : arguments.scale) * kLog2E) {
    BOUNDS_CHECK(unit > 0.0f);
  }

  __device__ __forceinline__ float capped(float score) const {
    return kSoftcap ? tanh_approximate(score * inside) : score;
  }
};

// This lane's part of a warp's rows.
template <int kHeadDim, int kRowTiles> struct RowSums {
  float output[kRowTiles][kHeadDim / 8][4];
  float sum[kRowTiles][kHalves];     // of this lane's columns only, until `finish`
  float anchor[kRowTiles][kHalves];  // kNegativeInfinity before the row has seen a key

  __device__ __forceinline__ RowSums() {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int dims = 0; dims < kHeadDim / 8; ++dims) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output[tile][dims][i] = 0.0f;
      }
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        sum[tile][half] = 0.0f;
        anchor[tile][half] = kNegativeInfinity;
      }
    }
  }

  // Adds up the sums of the four lanes of a row. Outputs are whole already: each lane has its own dims.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        sum[tile][half] += __shfl_xor_sync(kFullWarp, sum[tile][half], 1);
        sum[tile][half] += __shfl_xor_sync(kFullWarp, sum[tile][half], 2);
      }
    }
  }
};

// Which of a row tile's 16 rows the lane holds in `half`.
__device__ __forceinline__ int row_of_lane(int half) { return threadIdx.x % kWarpSize / 4 + half * 8; }

// The first of the two neighbouring columns, of a product's 8, that the lane holds.
__device__ __forceinline__ int column_of_lane() { return threadIdx.x % 4 * 2; }

// scores = Q K^T for `kKeys` keys. read_query(fragments, step) reads columns 16 * step to 16 * step + 15 of each row
// tile.
template <class T, int kHeadDim, int kRowTiles, int kKeys, class ReadQuery>
__device__ __forceinline__ void compute_scores(float (&scores)[kRowTiles][kKeys / 8][4],
                                               const FragmentReader<T, kHeadDim>& reader,
                                               const ReadQuery& read_query, const T* keys) {
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
    for (int column = 0; column < kKeys / 8; ++column) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[tile][column][i] = 0.0f;
    }
  }
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    uint32_t query[kRowTiles][4];
    read_query(query, step);
#pragma unroll
    for (int part = 0; part < kKeys / 16; ++part) {
      uint32_t key[4];
      reader.read_keys(key, keys + part * 16 * kHeadDim, step);
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        mma_m16n8k16<T>(scores[tile][2 * part], query[tile], key[0], key[1]);
        mma_m16n8k16<T>(scores[tile][2 * part + 1], query[tile], key[2], key[3]);
      }
    }
  }
}

template <int kRowTiles, int kKeys, bool kSoftcap>
__device__ __forceinline__ void cap_scores(float (&scores)[kRowTiles][kKeys / 8][4],
                                           const ScoreScale<kSoftcap>& scale) {
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
    for (int column = 0; column < kKeys / 8; ++column) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[tile][column][i] = scale.capped(scores[tile][column][i]);
    }
  }
}

// Masks the scores of keys that a row does not see. first_key: of the tile. visible(row tile, half): the range of keys
// that the lane's row sees.
template <int kRowTiles, int kKeys, class Visible>
__device__ __forceinline__ void mask_scores(float (&scores)[kRowTiles][kKeys / 8][4], int first_key,
                                            const Visible& visible) {
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const KeyRange range = visible(tile, half);
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        const int column = i / 2 * 8 + column_of_lane() + i % 2;
        if (!range.contains(first_key + column)) scores[tile][i / 2][half * 2 + i % 2] = masked_score();
      }
    }
  }
}

__device__ __forceinline__ bool is_above(float score, float unit, float anchor) {
  return fmaf(score, unit, -anchor) > kAnchorSlack;
}

// Moves the anchor of each row that has a score too far above it to the row's highest score, and multiplies what the
// row has summed up to match: by 1 in the other rows, by 0 where there was no anchor yet. All lanes take part.
template <int kHeadDim, int kRowTiles>
__device__ __forceinline__ void move_anchors(RowSums<kHeadDim, kRowTiles>& sums,
                                             const float (&highest_of_lane)[kRowTiles][kHalves], float unit) {
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float highest = highest_of_lane[tile][half];
      highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 2));
      const float anchor = sums.anchor[tile][half];
      const float moved = is_above(highest, unit, anchor) ? highest * unit : anchor;
      const float factor = exp2_approximate(anchor - moved);
      sums.anchor[tile][half] = moved;
      sums.sum[tile][half] *= factor;
#pragma unroll
      for (int dims = 0; dims < kHeadDim / 8; ++dims) {
        sums.output[tile][dims][half * 2] *= factor;
        sums.output[tile][dims][half * 2 + 1] *= factor;
      }
    }
  }
}

// Turns scores into weights, in place, and adds them to the sums.
template <int kHeadDim, int kRowTiles, int kKeys>
__device__ __forceinline__ void compute_weights(float (&scores)[kRowTiles][kKeys / 8][4],
                                                RowSums<kHeadDim, kRowTiles>& sums, float unit) {
  float highest[kRowTiles][kHalves];
  bool any_above = false;
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      highest[tile][half] = scores[tile][0][half * 2];
#pragma unroll
      for (int key = 1; key < kKeys / 4; ++key) {
        highest[tile][half] = fmaxf(highest[tile][half], scores[tile][key / 2][half * 2 + key % 2]);
      }
      any_above |= is_above(highest[tile][half], unit, sums.anchor[tile][half]);
    }
  }
  if (__any_sync(kFullWarp, any_above)) move_anchors(sums, highest, unit);

#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
    for (int column = 0; column < kKeys / 8; ++column) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores[tile][column][i];
        score = exp2_approximate(fmaf(score, unit, -sums.anchor[tile][i / 2]));
        sums.sum[tile][i / 2] += score;
      }
    }
  }
}

// output += weights V. The weights lie where the operand A of this product wants them: two 16 x 8 results side by side
// are, register for register, one 16 x 16 operand.
template <class T, int kHeadDim, int kRowTiles, int kKeys, class Reader>
__device__ __forceinline__ void add_values(RowSums<kHeadDim, kRowTiles>& sums, const Reader& reader,
                                           const float (&weights)[kRowTiles][kKeys / 8][4], const T* values) {
#pragma unroll
  for (int part = 0; part < kKeys / 16; ++part) {
    uint32_t weight[kRowTiles][4];
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&pairs)[4] = weights[tile][2 * part + i / 2];
        weight[tile][i] = pack<T>(pairs[i % 2 * 2], pairs[i % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      uint32_t value[4];
      reader.read_values(value, values + part * 16 * kHeadDim, step);
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        mma_m16n8k16<T>(sums.output[tile][2 * step], weight[tile], value[0], value[1]);
        mma_m16n8k16<T>(sums.output[tile][2 * step + 1], weight[tile], value[2], value[3]);
      }
    }
  }
}

// What the output of a row is multiplied by in the end: 1 / sum. The head's sink, a score without a value, joins the
// sum here, once. 0 for a row that has seen no key; where the sum is NaN the outputs are, too, and stay so.
__device__ __forceinline__ float normalization(float anchor, float sum, const float* sinks, int head) {
  if (!(sum > 0.0f)) return 0.0f;
  if (sinks == nullptr) return 1.0f / sum;
  const float sink = sinks[head] * kLog2E;
  const float highest = fmaxf(anchor, sink);
  const float weight = exp2_approximate(anchor - highest);
  return weight / (weight * sum + exp2_approximate(sink - highest));
}
