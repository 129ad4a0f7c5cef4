// Eight neighbouring 16-bit elements: what one thread moves by one 16-byte access, the widest there is.
//
//   uint4    x        y        z        w
//          [ 0  1 ] [ 2  3 ] [ 4  5 ] [ 6  7 ]    the lower half of each word comes first
#pragma once

#include "primitives.cuh"

constexpr int kOctet = 8;

// Round to T as a tensor of T would, and back.
template <class T> __device__ __forceinline__ float rounded(float value) {
  return to_float(from_float<T>(value));
}

template <class T> __device__ __forceinline__ void unpack_octet(float (&elements)[kOctet], uint4 octet) {
  const uint32_t words[4] = {octet.x, octet.y, octet.z, octet.w};
  for (int i = 0; i < kOctet; i++) elements[i] = to_float(T{uint16_t(words[i / 2] >> i % 2 * 16)});
}

template <class T> __device__ __forceinline__ uint4 pack_octet(const float (&elements)[kOctet]) {
  return {pack<T>(elements[0], elements[1]), pack<T>(elements[2], elements[3]),
          pack<T>(elements[4], elements[5]), pack<T>(elements[6], elements[7])};
}

// The octet at an address that is known to be a multiple of 16: of the pool, or of a tensor of our own.
template <class T> __device__ __forceinline__ uint4& octet_at(T* address) {
  BOUNDS_CHECK(uint64_t(address) % 16 == 0);
  return *reinterpret_cast<uint4*>(address);
}
template <class T> __device__ __forceinline__ const uint4& octet_at(const T* address) {
  BOUNDS_CHECK(uint64_t(address) % 16 == 0);
  return *reinterpret_cast<const uint4*>(address);
}

// Whether one access can move an octet here. Rows of an odd size or stride come element by element: slower,
// but right, and with the same bits.
__device__ __forceinline__ bool is_octet(const void* address, int count) {
  return count >= kOctet && uint64_t(address) % 16 == 0;
}

// The first `count` elements at `from`, at most eight and none where it is negative, and zeros for the rest.
template <class T> __device__ __forceinline__ uint4 load_octet(const T* from, int count = kOctet) {
  if (is_octet(from, count)) return octet_at(from);
  uint32_t words[4] = {};
  for (int i = 0; i < kOctet; i++)
    if (i < count) words[i / 2] |= uint32_t(from[i].bits) << i % 2 * 16;
  return {words[0], words[1], words[2], words[3]};
}

template <class T> __device__ __forceinline__ void store_octet(T* to, uint4 octet, int count = kOctet) {
  if (is_octet(to, count)) {
    octet_at(to) = octet;
    return;
  }
  const uint32_t words[4] = {octet.x, octet.y, octet.z, octet.w};
  for (int i = 0; i < kOctet; i++)
    if (i < count) to[i] = T{uint16_t(words[i / 2] >> i % 2 * 16)};
}
