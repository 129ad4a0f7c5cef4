// CPU bodies of primitives.cuh, which says what each of them is for.
#pragma once

#ifndef SIMT_CPU
#error "included by primitives.cuh where simt.h came first"
#endif

#define DYNAMIC_SHARED(name, bytes) unsigned char* const name = simt::dynamic_shared(bytes, simt::Site::here())

#define BOUNDS_CHECK(condition) \
  do { if (!(condition)) simt::fault(simt::Site::here(), "bounds check: " #condition); } while (0)

inline float to_float(bfloat16 value) { return __uint_as_float(uint32_t(value.bits) << 16); }

// Shifted into place, the exponent is 112 too low; multiplying by 2^112 mends that for subnormals too.
inline float to_float(float16 value) {
  const uint32_t magnitude = uint32_t(value.bits & 0x7fffu) << 13;
  const uint32_t sign = uint32_t(value.bits & 0x8000u) << 16;
  const bool is_finite = magnitude < 0x0f800000u;
  const uint32_t bits = is_finite ? __float_as_uint(__uint_as_float(magnitude) * 0x1p112f) : magnitude | 0x7f800000u;
  return __uint_as_float(bits | sign);
}

template <class T> T from_float(float value);

// NaN becomes 0x7fff, as the instruction has it, for both types.
template <> inline bfloat16 from_float<bfloat16>(float value) {
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <> inline float16 from_float<float16>(float value) {
  const uint32_t magnitude = __float_as_uint(value) & 0x7fffffffu;
  const uint32_t sign = __float_as_uint(value) >> 16 & 0x8000u;
  uint32_t bits;
  if (magnitude > 0x7f800000u) return {0x7fff};
  if (magnitude >= 0x477ff000u) {  // 65520, half a step above the largest
    bits = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: beside 0.5 the last bit is worth 2^-24, as here
    bits = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - __float_as_uint(0.5f);
  } else {
    bits = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  return {uint16_t(bits | sign)};
}

inline int64_t wide_product(int32_t left, int32_t right) { return int64_t(left) * right; }

template <class T> inline T kept(T value) { return value; }

template <class T> inline uint32_t pack(float low, float high) {
  return from_float<T>(low).bits | uint32_t(from_float<T>(high).bits) << 16;
}

// The product of two such numbers is exact in double, and so is its sum with a third, but for bits far below.
template <class T> inline uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  const auto number = [](uint32_t pair, int half) { return double(to_float(T{uint16_t(pair >> half * 16)})); };
  const auto result = [&](int half) { return float(number(a, half) * number(b, half) + number(c, half)); };
  return pack<T>(result(0), result(1));
}

// Subnormal results are flushed to zero.
inline float exp2_approximate(float x) {
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;
}

inline float tanh_approximate(float x) { return tanhf(x); }

namespace simt {

struct Fragments {
  uint32_t a[4], b[2];
};

template <class T> float unpack(uint32_t pair, int half) { return to_float(T{uint16_t(pair >> half * 16)}); }

// The fragments of 32 lanes become the product, four elements a lane. Each is summed in float32, k ascending.
template <class T> void multiply(Lanes& lanes) {
  float a[16][16], b[16][8], product[16][8] = {};
  for (int lane = 0; lane < kLanes; ++lane) {
    Fragments fragments;
    memcpy(&fragments, lanes.bytes[lane], sizeof fragments);
    const int group = lane / 4, pair = lane % 4 * 2;
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4; ++i)
        a[group + i % 2 * 8][pair + half + i / 2 * 8] = unpack<T>(fragments.a[i], half);
      for (int i = 0; i < 2; ++i) b[pair + half + i * 8][group] = unpack<T>(fragments.b[i], half);
    }
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < 8; ++column) product[row][column] += a[row][k] * b[k][column];
  for (int lane = 0; lane < kLanes; ++lane) {
    const int group = lane / 4, pair = lane % 4 * 2;
    const float own[4] = {product[group][pair], product[group][pair + 1], product[group + 8][pair],
                          product[group + 8][pair + 1]};
    memcpy(lanes.bytes[lane], own, sizeof own);
  }
}

// What needs a whole warp: no lane may have exited.
inline const Lanes& exchange_by_all(const void* bytes, size_t num_bytes, const char* operation, Site site,
                                    Combine combine = nullptr) {
  const Lanes& lanes = exchange(~0u, bytes, num_bytes, operation, site, combine);
  if (lanes.present != ~0u) fault(site, operation, " without all lanes of the warp");
  return lanes;
}

// A lane reads its row when it comes, not when all have: a missing barrier before it shows.
inline void load_matrices(uint32_t (&registers)[4], const void* row, bool transposed, const char* operation,
                          Site site) {
  read_shared_16(row, operation, site);
  const Lanes& rows = exchange_by_all(row, 16, operation, site);
  const auto element = [&](int matrix, int row_of, int column) {
    uint16_t bits;
    memcpy(&bits, rows.bytes[matrix * 8 + row_of] + column * 2, sizeof bits);
    return uint32_t(bits);
  };
  const int group = lane() / 4, pair = lane() % 4 * 2;
  for (int matrix = 0; matrix < 4; ++matrix)
    registers[matrix] = transposed ? element(matrix, pair, group) | element(matrix, pair + 1, group) << 16
                                   : element(matrix, group, pair) | element(matrix, group, pair + 1) << 16;
}

}  // namespace simt

template <class T>
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                         simt::Site site = simt::Site::here()) {
  const simt::Fragments own = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const simt::Lanes& lanes = simt::exchange_by_all(&own, sizeof own, "mma_m16n8k16", site, &simt::multiply<T>);
  float product[4];
  memcpy(product, lanes.bytes[simt::lane()], sizeof product);
  for (int i = 0; i < 4; ++i) d[i] += product[i];
}

inline void ldmatrix_x4(uint32_t (&registers)[4], const void* row, simt::Site site = simt::Site::here()) {
  simt::load_matrices(registers, row, false, "ldmatrix_x4", site);
}

inline void ldmatrix_x4_transposed(uint32_t (&registers)[4], const void* row,
                                   simt::Site site = simt::Site::here()) {
  simt::load_matrices(registers, row, true, "ldmatrix_x4_transposed", site);
}

inline void cp_async_16(void* shared, const void* global, bool valid, simt::Site site = simt::Site::here()) {
  simt::copy_async(shared, global, valid ? 16 : 0, site);
}

inline void cp_async_16_part(void* shared, const void* global, int num_bytes,
                             simt::Site site = simt::Site::here()) {
  if (num_bytes < 0 || num_bytes > 16) simt::fault(site, "cp_async_16_part of more or less than 0 to 16 bytes");
  simt::copy_async(shared, global, size_t(num_bytes), site);
}

inline void cp_async_commit() { simt::commit_copies(); }

template <int kPending> inline void cp_async_wait() { simt::wait_copies(kPending); }
