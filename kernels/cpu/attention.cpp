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
int attention_float32_int8(const AttentionArgs* args, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { attention<float, i8>(team, *args); });
}
int attention_bfloat16_int8(const AttentionArgs* args, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { attention<bf16, i8>(team, *args); });
}
int attention_float32_float8_e4m3fn(const AttentionArgs* args, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { attention<float, f8>(team, *args); });
}
int attention_bfloat16_float8_e4m3fn(const AttentionArgs* args, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { attention<bf16, f8>(team, *args); });
}

// How a pool of that dtype is multiplied with.
const char* attention_math_float32() { return MathOf<float>::type::NAME; }
const char* attention_math_bfloat16() { return MathOf<bf16>::type::NAME; }
const char* attention_math_int8() { return MathOf<i8>::type::NAME; }
const char* attention_math_float8_e4m3fn() { return MathOf<f8>::type::NAME; }

std::int64_t sizeof_attention_args() { return sizeof(AttentionArgs); }
}
