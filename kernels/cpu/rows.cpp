// The operations on rows as one call each, on OpenMP's threads. Named by the dtypes of rows and pool, and rope
// by that of cos and sin, too.
#include "rows.h"

using namespace pageturner;

extern "C" {

void write_kv_float32_float32(const KvWriteArgs* args, int num_threads) {
  OpenMpTeam team(num_threads);
  write_kv<float, float>(team, *args);
}
void write_kv_bfloat16_bfloat16(const KvWriteArgs* args, int num_threads) {
  OpenMpTeam team(num_threads);
  write_kv<bf16, bf16>(team, *args);
}
void write_kv_float32_bfloat16(const KvWriteArgs* args, int num_threads) {
  OpenMpTeam team(num_threads);
  write_kv<float, bf16>(team, *args);
}

void rope_and_write_kv_float32_float32_float32(const RotateArgs* rotate, const KvWriteArgs* args, int num_threads) {
  OpenMpTeam team(num_threads);
  rope_and_write_kv<float, float, float>(team, *rotate, *args);
}
void rope_and_write_kv_bfloat16_bfloat16_float32(const RotateArgs* rotate, const KvWriteArgs* args,
                                                 int num_threads) {
  OpenMpTeam team(num_threads);
  rope_and_write_kv<bf16, bf16, float>(team, *rotate, *args);
}
void rope_and_write_kv_float32_bfloat16_float32(const RotateArgs* rotate, const KvWriteArgs* args,
                                                int num_threads) {
  OpenMpTeam team(num_threads);
  rope_and_write_kv<float, bf16, float>(team, *rotate, *args);
}
void rope_and_write_kv_bfloat16_bfloat16_bfloat16(const RotateArgs* rotate, const KvWriteArgs* args,
                                                  int num_threads) {
  OpenMpTeam team(num_threads);
  rope_and_write_kv<bf16, bf16, bf16>(team, *rotate, *args);
}

void rms_norm_float32(const RmsNormArgs* args, int num_threads) {
  OpenMpTeam team(num_threads);
  rms_norm<float>(team, *args);
}
void rms_norm_bfloat16(const RmsNormArgs* args, int num_threads) {
  OpenMpTeam team(num_threads);
  rms_norm<bf16>(team, *args);
}

void silu_and_mul_float32(const float* gate_up, float* output, std::int64_t stride, int rows, int size,
                          int num_threads) {
  OpenMpTeam team(num_threads);
  silu_and_mul(team, gate_up, output, stride, rows, size);
}
void silu_and_mul_bfloat16(const bf16* gate_up, bf16* output, std::int64_t stride, int rows, int size,
                           int num_threads) {
  OpenMpTeam team(num_threads);
  silu_and_mul(team, gate_up, output, stride, rows, size);
}

std::int64_t sizeof_kv_write_args() { return sizeof(KvWriteArgs); }
std::int64_t sizeof_rotate_args() { return sizeof(RotateArgs); }
std::int64_t sizeof_rms_norm_args() { return sizeof(RmsNormArgs); }
}
