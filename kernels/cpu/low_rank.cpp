// What adapters add to one product, as one call on OpenMP's threads.
#include "entry.h"
#include "low_rank.h"
#include "packed_low_rank.h"

using namespace pageturner;

extern "C" {

// Named by the dtype of rows and output.
int add_low_rank_float32(const LowRankCall* call, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { add_low_rank<float>(team, *call); });
}
int add_low_rank_bfloat16(const LowRankCall* call, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { add_low_rank<bf16>(team, *call); });
}

int add_packed_low_rank(const PackedLowRankCall* call, int num_threads) {
  return on_openmp(num_threads, [&](Team& team) { add_packed_low_rank(team, *call); });
}

std::int64_t sizeof_low_rank_args() { return sizeof(LowRank); }
std::int64_t sizeof_low_rank_call_args() { return sizeof(LowRankCall); }
std::int64_t sizeof_packed_low_rank_args() { return sizeof(PackedLowRank); }
std::int64_t sizeof_packed_low_rank_call_args() { return sizeof(PackedLowRankCall); }
std::int64_t sizeof_adapter_layer_args() { return sizeof(AdapterLayer); }
}
