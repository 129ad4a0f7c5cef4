// Log-probabilities of known tokens, joined to the product whose outputs are the logits: a block of logits is folded
// into its row's sum of exponentials while it lies in cache, and no row of logits is ever in memory.
// reference_scores.token_scores defines the results.
//
// The sum of a row is that of its blocks of BLOCK outputs, each by its own maximum (an online softmax, Milakov and
// Gimelshein 2018, arXiv:1805.02867), all added up when the last one is there. Blocks are the same whatever rows,
// threads and pieces of work there are, hence a row's bits are, too.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "buffer.h"
#include "products.h"

namespace pageturner {

// Mirrored by ctypes in quantised_ops.py; kernels/known_tokens.py says what they are.
struct KnownTokens {
  const std::int32_t* starts;     // [num_rows + 1]
  const std::int32_t* token_ids;  // [starts[num_rows]]
  float* logprobs;                // [starts[num_rows]]
  float* top_logprobs;            // [num_rows, num_top]
  std::int64_t* top_ids;          // [num_rows, num_top]
  std::int32_t num_rows, num_top; // num_top: at most as many as there are outputs
};

// One of the likeliest tokens of a row; id -1 where there are fewer yet.
struct Candidate {
  float logit;
  std::int32_t id;
};

// What is known of rows while their logits come. Kept from one step to the next for its memory alone.
class RowScores {
 public:
  static constexpr int BLOCK = 128;  // outputs
  static constexpr int PANEL = 16;   // blocks of one piece of work

  // codes: known.num_rows rows, quantised in the head's groups.
  void score(Team& team, const PackedWeight& head, const void* codes, const KnownTokens& known) {
    if (!known.num_rows) return;
    const std::int64_t rows = known.num_rows;
    num_blocks = (head.out_features + BLOCK - 1) / BLOCK;
    stride = (num_blocks + WIDTH - 1) / WIDTH * WIDTH;
    panels = (num_blocks + PANEL - 1) / PANEL;
    largest.of(rows * stride);
    sums.of(rows * stride);
    candidates.of(rows * panels * known.num_top);
    const int together = rows_together(head), stretches = (known.num_rows + together - 1) / together;
    team.for_each(std::int64_t{stretches} * panels, [&](std::int64_t piece) {
      const int begin = int(piece / panels) * together;
      fold(head, codes, known, begin, std::min(together, known.num_rows - begin), int(piece % panels));
    });
    for_each_row(team, rows, stride, [&](std::int64_t row) { tell(known, row); });
  }

 private:
  Buffer<float> largest, sums;  // [rows, stride], of each block
  Buffer<Candidate> candidates; // [rows, panels, num_top]
  std::int64_t num_blocks = 0, stride = 0, panels = 0;

  // Rows whose codes and logits of one block stay in the second cache.
  static int rows_together(const PackedWeight& head) {
    constexpr std::int64_t CACHE = 256 << 10;
    return std::max<std::int64_t>(MAX_ROWS, CACHE / (head.code_row_bytes() + BLOCK * sizeof(float)));
  }

  // A panel of outputs, of rows [begin, begin + count).
  void fold(const PackedWeight& head, const void* codes, const KnownTokens& known, int begin, int count, int panel) {
    float* memory = scratch(tile_scratch(head) + std::size_t(count) * BLOCK);
    float* logits = memory + tile_scratch(head);
    const char* first = static_cast<const char*>(codes) + begin * head.code_row_bytes();
    for (int row = begin; row < begin + count; row++)
      std::fill_n(kept(row, panel, known.num_top), known.num_top, Candidate{-INFINITY, -1});
    const int last = int(std::min<std::int64_t>(num_blocks, (panel + 1) * PANEL));
    for (int block = panel * PANEL; block < last; block++) {
      const int output = block * BLOCK, outputs = std::min(BLOCK, head.out_features - output);
      if (outputs < BLOCK) std::fill_n(logits, std::size_t(count) * BLOCK, -INFINITY);
      for (int at = 0; at < outputs; at += LANES)
        multiply_tile(head, open_tile(head, (output + at) / LANES, memory), first, count, logits + at, BLOCK);
      for (int row = begin; row < begin + count; row++, logits += BLOCK) {
        const float top = sum_up(logits, row * stride + block);
        for (int i = known.starts[row]; i < known.starts[row + 1]; i++)
          if (known.token_ids[i] >= output && known.token_ids[i] < output + outputs)
            known.logprobs[i] = logits[known.token_ids[i] - output];  // its logit, for now
        if (known.num_top) keep_likeliest(logits, output, outputs, top, kept(row, panel, known.num_top), known.num_top);
      }
      logits -= std::int64_t{count} * BLOCK;
    }
  }

  Candidate* kept(std::int64_t row, std::int64_t panel, std::int64_t num_top) const {
    return candidates.data() + (row * panels + panel) * num_top;
  }

  // The block's maximum and its sum of exponentials by that. Where all is -inf the sum is 0; NaN and +inf make it NaN.
  float sum_up(const float* logits, std::int64_t place) {
    Floats top = splat(-INFINITY);
    for (int i = 0; i < BLOCK; i += WIDTH) top = max(load(logits + i), top);
    const float anchor = max_lanes(top);
    const Floats subtrahend = splat(anchor == -INFINITY ? 0.0f : anchor);
    Sixteen total;
    for (int i = 0; i < BLOCK; i += LANES)
      for (int part = 0; part < LANES / WIDTH; part++)
        total.part[part] += exp(load(logits + i + part * WIDTH) - subtrahend);
    largest.data()[place] = anchor;
    sums.data()[place] = total.sum();
    return anchor;
  }

  // Among those kept so far; outputs come in ascending order, so that of equals the lowest ids stay. top: the maximum.
  static void keep_likeliest(const float* logits, int output, int outputs, float top, Candidate* kept, int num_top) {
    const Candidate& least = kept[num_top - 1];
    if (least.id >= 0 && !(top > least.logit)) return;
    for (int i = 0; i < outputs; i += WIDTH) {
      if (least.id >= 0 && !any_above(load(logits + i), least.logit)) continue;
      for (int at = i; at < std::min(i + WIDTH, outputs); at++) insert(kept, num_top, {logits[at], output + at});
    }
  }

  // Into candidates by logit, the likeliest first; behind its equals, or nowhere.
  static void insert(Candidate* kept, int num_top, Candidate candidate) {
    const auto precedes = [&](const Candidate& other) { return other.id < 0 || candidate.logit > other.logit; };
    int place = num_top;
    for (; place > 0 && precedes(kept[place - 1]); place--)
      if (place < num_top) kept[place] = kept[place - 1];
    if (place < num_top) kept[place] = candidate;
  }

  // The row's results, once all its blocks are there.
  void tell(const KnownTokens& known, std::int64_t row) const {
    const double mass = log_mass(largest.data() + row * stride, sums.data() + row * stride);
    for (int token = known.starts[row]; token < known.starts[row + 1]; token++)
      known.logprobs[token] = float(known.logprobs[token] - mass);
    const int num_top = known.num_top;
    if (!num_top) return;
    Candidate* likeliest = kept(row, 0, num_top);  // those of the other panels, which have higher ids, join them
    for (const Candidate* other = kept(row, 1, num_top); other < kept(row + 1, 0, num_top); other++)
      if (other->id >= 0) insert(likeliest, num_top, *other);
    for (int i = 0; i < num_top; i++) {
      known.top_logprobs[row * num_top + i] = float(likeliest[i].logit - mass);
      known.top_ids[row * num_top + i] = likeliest[i].id;
    }
  }

  // The logarithm of a row's sum of exponentials; NaN where the row holds NaN or +inf, or nothing but -inf.
  double log_mass(float* block_largest, float* block_sums) const {
    std::fill(block_largest + num_blocks, block_largest + stride, -INFINITY);
    std::fill(block_sums + num_blocks, block_sums + stride, 0.0f);
    Floats most = splat(-INFINITY);
    for (std::int64_t i = 0; i < stride; i += WIDTH) most = max(load(block_largest + i), most);
    const float anchor = max_lanes(most);
    if (anchor == -INFINITY) return NAN;
    double total = 0;
    for (std::int64_t i = 0; i < stride; i += WIDTH) {
      const Floats parts = load(block_sums + i) * exp(load(block_largest + i) - splat(anchor));
      for (int lane = 0; lane < WIDTH; lane++) total += parts[lane];
    }
    return anchor + std::log(total);
  }
};

}  // namespace pageturner
