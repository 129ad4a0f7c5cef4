// What the compiler's ThreadSanitizer instrumentation calls in the text of a kernel, before each access to memory.
// Shared memory is looked at, by race_check.h; the rest of the machine is not instrumented.
#include <cstddef>
#include <cstdint>

#include "machine.h"

namespace {

// `position` itself, which threadIdx reads, lies beside static shared memory.
void look(const void* address, size_t num_bytes, bool is_write, const void* code) {
  if (address != &simt::position) simt::access(address, num_bytes, is_write, code);
}

}  // namespace

#define ACCESS(name, bytes, is_write) \
  extern "C" void __tsan_##name(const void* address) { look(address, bytes, is_write, __builtin_return_address(0)); }
#define ACCESSES(bytes)                     \
  ACCESS(read##bytes, bytes, false)           \
  ACCESS(write##bytes, bytes, true)           \
  ACCESS(volatile_read##bytes, bytes, false)  \
  ACCESS(volatile_write##bytes, bytes, true)  \
  ACCESS(unaligned_read##bytes, bytes, false) \
  ACCESS(unaligned_write##bytes, bytes, true)

ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

extern "C" {

void __tsan_read_range(const void* address, size_t bytes) { look(address, bytes, false, __builtin_return_address(0)); }
void __tsan_write_range(const void* address, size_t bytes) { look(address, bytes, true, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(const void*) {}
void __tsan_func_exit() {}

// Atomics race with nothing.
int __tsan_atomic32_fetch_add(int* address, int value, int) {
  return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}

}  // extern "C"
