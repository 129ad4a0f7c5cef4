// A team of persistent threads, made for many short operations in a row and for cores shared with others.
//
// A phase is one for_each. `open` holds its number and how many pieces are unclaimed, so that a claim is
// one compare-and-swap which fails if the phase is over: a thread that comes late takes nothing, and the
// caller waits for claimed pieces alone, never for a thread to appear. So a thread without a core costs
// its share of the work, and one that loses its core in a piece delays the phase by that piece.
//
// A thread without work spins for SPIN, since the next phase is mostly microseconds away, then sleeps in
// the kernel (a futex): an idle team uses no processor, and leaves a core to the thread that lacks one.
// No lock is ever held, so a fork at any moment leaves the child a team that works: of the caller alone.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include "team.h"

namespace pageturner {

// A word that threads sleep on until it changes.
class SleepWord {
 public:
  explicit SleepWord(std::uint32_t value = 0) : word(value) {}
  std::atomic<std::uint32_t>& value() { return word; }

  // Returns when woken, at once if the word is not `seen`, or for no reason.
  void sleep(std::uint32_t seen) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
    if (word == seen) std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
  }

  void wake_all() {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
  }

 private:
  std::atomic<std::uint32_t> word;
  static_assert(sizeof(std::atomic<std::uint32_t>) == 4 && std::atomic<std::uint32_t>::is_always_lock_free);
};

class ThreadTeam final : public Team {
 public:
  // If the system gives fewer threads, the team is smaller.
  explicit ThreadTeam(int size) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the process's other threads
    for (int i = 1; i < size; i++) {
      pthread_t thread;
      if (pthread_create(&thread, nullptr, [](void* team) -> void* {
            static_cast<ThreadTeam*>(team)->serve();
            return nullptr;
          }, this))
        break;
      threads.push_back(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  // No for_each may be under way.
  ~ThreadTeam() override {
    if (getpid() != owner) return;  // a child of fork has no threads to join
    stopping = true;
    ring();
    for (pthread_t thread : threads) pthread_join(thread, nullptr);
  }

  int size() const override { return int(threads.size()) + 1; }
  std::int64_t worth_a_thread() const override { return 1 << 12; }

 private:
  static constexpr auto SPIN = std::chrono::microseconds(50);
  static constexpr int PAUSES = 32;  // between two looks at the clock

  static std::uint32_t phase_of(std::uint64_t open) { return open >> 32; }
  static std::uint32_t unclaimed_of(std::uint64_t open) { return std::uint32_t(open); }

  void run(const Work& work) override {
    // From inside a piece, from a second thread, or for more pieces than a word counts: without the others.
    if (work.count > INT_MAX || busy.test_and_set(std::memory_order_acquire)) {
      for (std::int64_t i = 0; i < work.count; i++) work.call(work.f, i);
      return;
    }
    const std::uint32_t count = work.count;
    current.store(&work, std::memory_order_release);
    unfinished.value().store(count, std::memory_order_relaxed);
    open.store((std::uint64_t(phase_of(open) + 1) << 32) | count, std::memory_order_release);
    ring();
    take_part();
    await_claimed();
    busy.clear(std::memory_order_release);
  }

  // Claims and computes pieces until none is left.
  void take_part() {
    std::uint32_t finished = 0;
    std::uint64_t seen = open.load(std::memory_order_acquire);
    while (unclaimed_of(seen)) {
      const Work* work = current.load(std::memory_order_acquire);
      // Success means that the phase still has unfinished pieces, hence that `work` is its own.
      if (!open.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) continue;
      work->call(work->f, work->count - unclaimed_of(seen));
      finished++;
      seen = open.load(std::memory_order_acquire);
    }
    // After the first fetch_sub that reaches zero the caller may go on, and `open` be another phase's.
    if (finished && unfinished.value().fetch_sub(finished) == finished && caller_sleeps) unfinished.wake_all();
  }

  void await_claimed() {
    if (spin_until([&] { return unfinished.value().load(std::memory_order_acquire) == 0; })) return;
    caller_sleeps = true;
    while (const std::uint32_t left = unfinished.value()) unfinished.sleep(left);
    caller_sleeps = false;
  }

  void serve() {
    for (std::uint32_t seen = 0;;) {
      await_phase_after(seen);
      if (stopping) return;
      seen = phase_of(open.load(std::memory_order_acquire));
      take_part();
    }
  }

  void await_phase_after(std::uint32_t seen) {
    const auto is_over = [&] { return phase_of(open.load(std::memory_order_acquire)) != seen || stopping; };
    if (spin_until(is_over)) return;
    sleepers++;
    for (std::uint32_t heard = bell.value(); !is_over(); heard = bell.value()) bell.sleep(heard);
    sleepers--;
  }

  // Sequentially consistent, as are a sleeper's steps: either it hears the bell, or it is seen here.
  void ring() {
    bell.value()++;
    if (sleepers) bell.wake_all();
  }

  template <class Condition>
  static bool spin_until(const Condition& condition) {
    if (condition()) return true;
    const auto end = std::chrono::steady_clock::now() + SPIN;
    do {
      for (int i = 0; i < PAUSES; i++) {
        if (condition()) return true;
        pause();
      }
    } while (std::chrono::steady_clock::now() < end);
    return false;
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
  }

  const pid_t owner = getpid();
  std::vector<pthread_t> threads;
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
  std::atomic<bool> stopping{false};

  // Each on cache lines of its own: claims and ends come from all threads.
  alignas(128) std::atomic<std::uint64_t> open{0};
  std::atomic<const Work*> current{nullptr};
  alignas(128) SleepWord unfinished;
  std::atomic<bool> caller_sleeps{false};
  alignas(128) SleepWord bell;
  std::atomic<std::uint32_t> sleepers{0};
};

}  // namespace pageturner
