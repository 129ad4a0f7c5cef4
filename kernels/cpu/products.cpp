// Products with quantised weights as one call each, on OpenMP's threads.
#include "entry.h"
#include "fused.h"
#include "scores.h"

using namespace pageturner;

extern "C" {

int quantise_rows_float32(const float* rows, std::int64_t row_stride, int num_rows, int in_features, int group,
                          void* codes, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) {
    quantise_rows(team, rows, row_stride, num_rows, in_features, group, codes);
  });
}

// codes: room for num_rows * code_row_bytes. output [num_rows, out_features].
int linear_quantised(const PackedWeight* weight, const float* rows, std::int64_t row_stride, int num_rows,
                     void* codes, float* output, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) {
    quantise_rows(team, rows, row_stride, num_rows, weight->in_features, weight->group, codes);
    product(team, *weight, codes, num_rows, output, weight->out_features);
  });
}

// codes: as above, for weight. Without residual, summed stays as it is.
int norm_linear_quantised(const NormRows* rows, const PackedWeight* weight, void* codes, float* output,
                          int num_threads) {
  return on_openmp(num_threads, [&](Team& team) {
    norm_and_quantise(team, *rows, weight->group, codes);
    product(team, *weight, codes, rows->num_rows, output, weight->out_features);
  });
}

// codes: as above. What the product's outputs say of known tokens, in place of them.
int norm_scores_quantised(const NormRows* rows, const PackedWeight* weight, void* codes, const KnownTokens* known,
                          int num_threads) {
  return on_openmp(num_threads, [&](Team& team) {
    norm_and_quantise(team, *rows, weight->group, codes);
    RowScores().score(team, *weight, codes, *known);
  });
}

// codes, gated: room for the rows that gate_up and down read.
int norm_mlp_quantised(const NormRows* rows, const PackedWeight* gate_up, const PackedWeight* down, void* codes,
                       void* gated, float* output, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) {
    norm_and_quantise(team, *rows, gate_up->group, codes);
    gated_product(team, *gate_up, codes, rows->num_rows, down->group, gated);
    product(team, *down, gated, rows->num_rows, output, down->out_features);
  });
}

std::int64_t sizeof_known_tokens() { return sizeof(KnownTokens); }
std::int64_t sizeof_norm_rows() { return sizeof(NormRows); }
std::int64_t sizeof_packed_weight() { return sizeof(PackedWeight); }
const char* dot_name() { return Dot::NAME; }
}
