// Attention as one call, on OpenMP's threads. Named by the dtypes of rows and pool.
#include "attention.h"

using namespace pageturner;

extern "C" {

void attention_float32_float32(const AttentionArgs* args, int num_threads) {
  OpenMpTeam team(num_threads);
  attention<float, float>(team, *args);
}
void attention_bfloat16_bfloat16(const AttentionArgs* args, int num_threads) {
  OpenMpTeam team(num_threads);
  attention<bf16, bf16>(team, *args);
}
void attention_float32_bfloat16(const AttentionArgs* args, int num_threads) {
  OpenMpTeam team(num_threads);
  attention<float, bf16>(team, *args);
}

std::int64_t sizeof_attention_args() { return sizeof(AttentionArgs); }
}
