// Attention as one call, on OpenMP's threads. Named by the dtypes of rows and pool.
#include "attention.h"
#include "entry.h"

using namespace pageturner;

extern "C" {

int attention_float32_float32(const AttentionArgs* args, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { attention<float, float>(team, *args); });
}
int attention_bfloat16_bfloat16(const AttentionArgs* args, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { attention<bf16, bf16>(team, *args); });
}
int attention_float32_bfloat16(const AttentionArgs* args, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { attention<float, bf16>(team, *args); });
}

// How a pool of that dtype is multiplied with.
const char* attention_math_float32() { return MathOf<float>::type::NAME; }
const char* attention_math_bfloat16() { return MathOf<bf16>::type::NAME; }

std::int64_t sizeof_attention_args() { return sizeof(AttentionArgs); }
}
