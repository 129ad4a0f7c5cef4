// What UndefinedBehaviorSanitizer's checks in the text of a kernel call: each is a fault of the thread, told by
// line. On a GPU a misaligned vector access stops the kernel, and the others read or write somewhere.
#include <cstdint>

#include "machine.h"

namespace {

// Every description that the compiler hands over begins with the place.
struct Description {
  const char* file;
  uint32_t line, column;
};

}  // namespace

#define UNDEFINED(handler, what)                                                      \
  extern "C" void __ubsan_handle_##handler(const Description* at, uintptr_t, uintptr_t) { \
    simt::fault({at->file, int(at->line)}, what);                                     \
  }

UNDEFINED(type_mismatch_v1, "a null or misaligned address")
UNDEFINED(out_of_bounds, "an index beyond its array")
UNDEFINED(add_overflow, "a sum that overflows")
UNDEFINED(sub_overflow, "a difference that overflows")
UNDEFINED(mul_overflow, "a product that overflows")
UNDEFINED(negate_overflow, "a negation that overflows")
UNDEFINED(divrem_overflow, "a division by zero, or that overflows")
UNDEFINED(shift_out_of_bounds, "a shift beyond the width of its type")
