// The decoder's forward as one call.
#include "entry.h"
#include "forward.h"

using namespace pageturner;

extern "C" {

int decoder_create(const DecoderModel* model, int num_threads, void** decoder) {
  return entered([&] { *decoder = new DecoderForward(*model, num_threads); });
}
int decoder_destroy(void* decoder) {
  return entered([&] { delete static_cast<DecoderForward*>(decoder); });
}

// Named by the dtype of the pool.
int decoder_forward_float32(void* decoder, const DecoderStep* step) {
  return entered([&] { static_cast<DecoderForward*>(decoder)->forward<float>(*step); });
}
int decoder_forward_bfloat16(void* decoder, const DecoderStep* step) {
  return entered([&] { static_cast<DecoderForward*>(decoder)->forward<bf16>(*step); });
}
int decoder_forward_int8(void* decoder, const DecoderStep* step) {
  return entered([&] { static_cast<DecoderForward*>(decoder)->forward<i8>(*step); });
}
int decoder_forward_float8_e4m3fn(void* decoder, const DecoderStep* step) {
  return entered([&] { static_cast<DecoderForward*>(decoder)->forward<f8>(*step); });
}

// seconds: one for each Phase.
int decoder_profile(void* decoder, double* seconds) {
  return entered([&] {
    const auto found = static_cast<DecoderForward*>(decoder)->profile();
    std::copy(found.begin(), found.end(), seconds);
  });
}

std::int64_t sizeof_decoder_layer_args() { return sizeof(DecoderLayer); }
std::int64_t sizeof_decoder_model_args() { return sizeof(DecoderModel); }
std::int64_t sizeof_decoder_step_args() { return sizeof(DecoderStep); }
}
