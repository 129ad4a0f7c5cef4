// The operations on rows as one call each, on OpenMP's threads. Named by the dtypes of rows and pool, and rope
// by that of cos and sin, too.
#include "entry.h"
#include "rows.h"

using namespace pageturner;

extern "C" {

int write_kv_float32_float32(const KvWriteArgs* args, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { write_kv<float, float>(team, *args); });
}
int write_kv_bfloat16_bfloat16(const KvWriteArgs* args, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { write_kv<bf16, bf16>(team, *args); });
}
int write_kv_float32_bfloat16(const KvWriteArgs* args, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { write_kv<float, bf16>(team, *args); });
}
int write_kv_float32_int8(const KvWriteArgs* args, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { write_kv<float, i8>(team, *args); });
}
int write_kv_float32_float8_e4m3fn(const KvWriteArgs* args, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { write_kv<float, f8>(team, *args); });
}
int write_kv_bfloat16_int8(const KvWriteArgs* args, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { write_kv<bf16, i8>(team, *args); });
}
int write_kv_bfloat16_float8_e4m3fn(const KvWriteArgs* args, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { write_kv<bf16, f8>(team, *args); });
}

int rope_and_write_kv_float32_float32_float32(const RotateArgs* rotate, const KvWriteArgs* args, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { rope_and_write_kv<float, float, float>(team, *rotate, *args); });
}
int rope_and_write_kv_bfloat16_bfloat16_float32(const RotateArgs* rotate, const KvWriteArgs* args,
                                                int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { rope_and_write_kv<bf16, bf16, float>(team, *rotate, *args); });
}
int rope_and_write_kv_float32_bfloat16_float32(const RotateArgs* rotate, const KvWriteArgs* args,
                                               int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { rope_and_write_kv<float, bf16, float>(team, *rotate, *args); });
}
int rope_and_write_kv_bfloat16_bfloat16_bfloat16(const RotateArgs* rotate, const KvWriteArgs* args,
                                                 int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { rope_and_write_kv<bf16, bf16, bf16>(team, *rotate, *args); });
}
int rope_and_write_kv_float32_int8_float32(const RotateArgs* rotate, const KvWriteArgs* args,
                                           int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { rope_and_write_kv<float, i8, float>(team, *rotate, *args); });
}
int rope_and_write_kv_float32_float8_e4m3fn_float32(const RotateArgs* rotate, const KvWriteArgs* args,
                                                    int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { rope_and_write_kv<float, f8, float>(team, *rotate, *args); });
}
int rope_and_write_kv_bfloat16_int8_float32(const RotateArgs* rotate, const KvWriteArgs* args,
                                            int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { rope_and_write_kv<bf16, i8, float>(team, *rotate, *args); });
}
int rope_and_write_kv_bfloat16_float8_e4m3fn_float32(const RotateArgs* rotate, const KvWriteArgs* args,
                                                     int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { rope_and_write_kv<bf16, f8, float>(team, *rotate, *args); });
}
int rope_and_write_kv_bfloat16_int8_bfloat16(const RotateArgs* rotate, const KvWriteArgs* args,
                                             int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { rope_and_write_kv<bf16, i8, bf16>(team, *rotate, *args); });
}
int rope_and_write_kv_bfloat16_float8_e4m3fn_bfloat16(const RotateArgs* rotate, const KvWriteArgs* args,
                                                      int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { rope_and_write_kv<bf16, f8, bf16>(team, *rotate, *args); });
}

int rms_norm_float32(const RmsNormArgs* args, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { rms_norm<float>(team, *args); });
}
int rms_norm_bfloat16(const RmsNormArgs* args, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { rms_norm<bf16>(team, *args); });
}

int silu_and_mul_float32(const float* gate_up, float* output, std::int64_t stride, int rows, int size,
                         int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { silu_and_mul(team, gate_up, output, stride, rows, size); });
}
int silu_and_mul_bfloat16(const bf16* gate_up, bf16* output, std::int64_t stride, int rows, int size,
                          int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { silu_and_mul(team, gate_up, output, stride, rows, size); });
}

std::int64_t sizeof_kv_write_args() { return sizeof(KvWriteArgs); }
std::int64_t sizeof_rotate_args() { return sizeof(RotateArgs); }
std::int64_t sizeof_rms_norm_args() { return sizeof(RmsNormArgs); }
}
