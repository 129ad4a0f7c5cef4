// Fibers: stacks that take turns on one OS thread, switched by hand.
#pragma once

#include <cstddef>
#include <vector>

#if !defined(__x86_64__)
#define SIMT_UCONTEXT  // also given by hand, to run that branch where the other would be taken
#endif

#ifdef SIMT_UCONTEXT
#include <ucontext.h>
#endif

namespace simt {

// Where a fiber goes on when it is switched to.
struct Fiber {
#ifdef SIMT_UCONTEXT
  ucontext_t context;
#else
  void* stack_pointer = nullptr;  // its callee-saved registers lie there, then the address to return to
#endif
};

// A stack that grows down towards a canary and, below that, pages that may not be touched: a small overflow is
// found when the fiber is done, a large one ends the process, and neither reaches another's memory.
class Stack {
 public:
  // Stacks outlive a launch: mapping them anew each time would cost more than most kernels.
  static std::vector<Stack> take(size_t count);
  static void give_back(std::vector<Stack> stacks);

  ~Stack();
  Stack(Stack&& other) noexcept : base_(other.base_) { other.base_ = nullptr; }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  Stack& operator=(Stack&&) = delete;

  // Make `fiber` start at `entry`, which never returns, when it is switched to for the first time.
  void prepare(Fiber& fiber, void (*entry)());
  bool overflowed() const;

 private:
  Stack();
  void unpoison();

  unsigned char* base_;
};

// Leave `from`, to go on here when another fiber switches back to it, and go on in `to`.
void switch_fiber(Fiber& from, Fiber& to);

}  // namespace simt
