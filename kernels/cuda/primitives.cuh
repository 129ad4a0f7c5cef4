// The instructions that CUDA C++ has no operator for: tensor-core products, asynchronous copies, conversions.
//
// This is the only file with two bodies: PTX below, plain C++ in emulation/primitives.h when the kernels are
// compiled for the CPU (SIMT_CPU). All the rest of a kernel is common text. No CUDA header is needed: 16-bit
// floats travel as their bits.
#pragma once

#ifndef SIMT_CPU
using int32_t = int;
using int64_t = long long;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
#endif

constexpr int kWarpSize = 32;
constexpr uint32_t kFullWarp = 0xffffffffu;
constexpr float kLog2E = 1.4426950408889634f;

// Stands for "no key seen yet" in a running maximum. Finite, so that the difference of two is 0 and never NaN.
constexpr float kNegativeInfinity = -1e30f;

// A 16-bit float by its bits. bfloat16 and float16 are told apart by type, for overloads and templates.
struct bfloat16 { uint16_t bits; };
struct float16 { uint16_t bits; };

// What a pool of codes keeps in a byte (kernels/kv_codes.py), told apart in the same way.
struct int8_code { unsigned char bits; };
struct fp8_code { unsigned char bits; };

#ifdef SIMT_CPU
#include "emulation/primitives.h"
#else

// Shared memory of the size given at launch. `bytes` is what the kernel uses of it: the emulator checks that.
#define DYNAMIC_SHARED(name, bytes) \
  extern __shared__ __align__(128) unsigned char name[]; \
  static_assert((bytes) > 0, "what the kernel uses of " #name)

// In the debug build only: a kernel that is about to leave its arrays stops instead.
#ifdef PAGETURNER_BOUNDS_CHECK
#define BOUNDS_CHECK(condition) do { if (!(condition)) __trap(); } while (0)
#else
#define BOUNDS_CHECK(condition) do { } while (0)
#endif

__device__ __forceinline__ float to_float(bfloat16 value) { return __uint_as_float(uint32_t(value.bits) << 16); }

__device__ __forceinline__ float to_float(float16 value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
}

// Round to nearest, ties to even.
template <class T> __device__ __forceinline__ T from_float(float value);

template <> __device__ __forceinline__ bfloat16 from_float<bfloat16>(float value) {
  bfloat16 narrow;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
  return narrow;
}

template <> __device__ __forceinline__ float16 from_float<float16>(float value) {
  float16 narrow;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
  return narrow;
}

// 32 x 32 -> 64 bits in one instruction. The compiler finds it only where it sees both operands being widened.
__device__ __forceinline__ int64_t wide_product(int32_t left, int32_t right) {
  int64_t product;
  asm("mul.wide.s32 %0, %1, %2;" : "=l"(product) : "r"(left), "r"(right));
  return product;
}

// The same value, but the compiler no longer knows how it came about. So it neither computes it again at each use, to
// save the register, nor draws conclusions from it that cost registers in a loop.
__device__ __forceinline__ int32_t kept(int32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

template <class T> __device__ __forceinline__ T* kept(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// Two values in one register, `low` in the lower half, as a row of a fragment holds them.
template <class T> __device__ __forceinline__ uint32_t pack(float low, float high);

template <> __device__ __forceinline__ uint32_t pack<bfloat16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

template <> __device__ __forceinline__ uint32_t pack<float16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// a * b + c of both numbers of a register, each rounded once; subnormal ones too.
template <class T> __device__ __forceinline__ uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c);

template <> __device__ __forceinline__ uint32_t fma_pair<bfloat16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
}

template <> __device__ __forceinline__ uint32_t fma_pair<float16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t pair;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
}

// 2^x with a relative error of at most 2^-22; 1 for 0, and 0 below -126, where results would be subnormal. One
// instruction.
__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh with a relative error below 2^-11 (PTX manual; 2^-16 was measured, NVIDIA forum 173291). That of the score is
// as large: no more than what rounding queries and keys to 16 bits brings about. One instruction.
__device__ __forceinline__ float tanh_approximate(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// D += A B for a warp: A 16 x 16 (row-major fragments), B 16 x 8 (column fragments), D 16 x 8 in float32.
//
// Lane l holds, with g = l / 4 and t = l % 4 * 2, two neighbours a register:
//   a[0] row g     columns t, t + 1        b0 rows t, t + 1        of column g
//   a[1] row g + 8 columns t, t + 1        b1 rows t + 8, t + 9    of column g
//   a[2] row g     columns t + 8, t + 9
//   a[3] row g + 8 columns t + 8, t + 9    d[0..1] row g columns t, t + 1;  d[2..3] row g + 8
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                       uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<float16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                      uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

// Four 8 x 8 matrices of 16-bit elements from shared memory. Lane l names a row of 16 bytes: lanes 0-7 the rows
// of matrix 0, 8-15 of matrix 1, and so on. registers[j] of lane l gets, of matrix j, row l / 4, columns
// l % 4 * 2 and the next: what mma_m16n8k16 wants of A, or of B when shared memory holds B's columns as rows.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&registers)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same with each matrix transposed: lane l gets rows l % 4 * 2 and the next of column l / 4.
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&registers)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(shared_address(row))
               : "memory");
}

// Start copying the first `num_bytes` of 16 bytes to shared memory, and zeros for the rest, which is not read. Both
// addresses are multiples of 16. The bytes are there for this thread once cp_async_wait has let their group through,
// and for the other threads after a barrier that follows.
__device__ __forceinline__ void cp_async_16_part(void* shared, const void* global, int num_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :: "r"(shared_address(shared)), "l"(global), "r"(num_bytes)
               : "memory");
}

// All 16 or, where not `valid`, none of them.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid) {
  cp_async_16_part(shared, global, valid ? 16 : 0);
}

// The copies of this thread since its last commit become one group, which may be empty.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most `kPending` of this thread's newest groups are unfinished.
template <int kPending> __device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(kPending) : "memory");
}

#endif  // SIMT_CPU
