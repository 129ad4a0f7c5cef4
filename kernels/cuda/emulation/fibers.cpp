#include "fibers.h"

#include <sys/mman.h>

#include <cstring>
#include <mutex>
#include <new>
#include <utility>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace simt {
namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr size_t kStackBytes = 256 << 10;  // its frames are several times as large
#else
constexpr size_t kStackBytes = 64 << 10;
#endif
constexpr size_t kGuardBytes = 64 << 10;
constexpr size_t kCanaryBytes = 4 << 10;
constexpr unsigned char kCanary = 0xa5;

std::mutex mutex;
std::vector<Stack> unused;  // guarded by mutex

}  // namespace

std::vector<Stack> Stack::take(size_t count) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<Stack> taken;
  for (; taken.size() < count && !unused.empty(); unused.pop_back()) taken.push_back(std::move(unused.back()));
  while (taken.size() < count) taken.push_back(Stack());
  return taken;
}

void Stack::give_back(std::vector<Stack> stacks) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (Stack& stack : stacks)
    if (!stack.overflowed()) unused.push_back(std::move(stack));
}

Stack::Stack() {
  void* mapped = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<unsigned char*>(mapped) + kGuardBytes;
  mprotect(mapped, kGuardBytes, PROT_NONE);
  memset(base_, kCanary, kCanaryBytes);
}

Stack::~Stack() {
  if (base_ != nullptr) munmap(base_ - kGuardBytes, kGuardBytes + kStackBytes);
}

bool Stack::overflowed() const {
  for (size_t i = 0; i < kCanaryBytes; ++i)
    if (base_[i] != kCanary) return true;
  return false;
}

void Stack::unpoison() {
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(base_, kStackBytes);  // a fiber that was left behind has left its frames
#endif
}

#ifdef SIMT_UCONTEXT

void Stack::prepare(Fiber& fiber, void (*entry)()) {
  unpoison();
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = base_;
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}

void switch_fiber(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

#else

// Saves what a call must preserve on the old stack, and takes it up from the new one.
extern "C" void simt_switch_stack(void** save, void* load);
asm(R"(
.text
.type simt_switch_stack, @function
simt_switch_stack:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size simt_switch_stack, . - simt_switch_stack
)");

void Stack::prepare(Fiber& fiber, void (*entry)()) {
  unpoison();
  constexpr int kSavedRegisters = 6;
  // At `entry` the stack pointer is 8 below a multiple of 16, as after a call.
  void** top = reinterpret_cast<void**>(base_ + kStackBytes) - 2;
  *top = reinterpret_cast<void*>(entry);
  fiber.stack_pointer = top - kSavedRegisters;
}

void switch_fiber(Fiber& from, Fiber& to) { simt_switch_stack(&from.stack_pointer, to.stack_pointer); }

#endif

}  // namespace simt
