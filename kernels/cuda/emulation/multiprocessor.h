// Runs the blocks of a launch, one after another, on the OS thread that made it: every CUDA thread is a fiber.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "race_check.h"
#include "shared_memory.h"
#include "threads.h"

namespace simt {

// What the OS threads of one launch share.
struct Progress {
  std::atomic<unsigned> next_block{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::string report;

  // The first failure is the one that is told.
  void fail(const std::string& message) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!failed.exchange(true)) report = message;
  }
};

using Body = void (*)(const void*);

// 0, 1 ... count - 1, in the order that the launch asks for.
std::vector<unsigned> arranged(const Launch& launch, size_t count, unsigned salt);

class Multiprocessor {
 public:
  Multiprocessor(const Launch& launch, Body body, const void* arguments, Progress& progress);
  ~Multiprocessor();
  Multiprocessor(const Multiprocessor&) = delete;
  Multiprocessor& operator=(const Multiprocessor&) = delete;

  // Comes back when all threads have exited, or when one has met a fault.
  void run_block(unsigned index);

  // What the thread that runs now asks for: see machine.h.
  void block_barrier(Site site);
  const Lanes& exchange(uint32_t mask, const void* bytes, size_t num_bytes, const char* operation, Site site,
                        Combine combine);
  unsigned char* dynamic_shared(size_t bytes, Site site);
  void read_shared_16(const void* address, const char* operation, Site site);
  void access(const void* address, size_t num_bytes, Access access, const Place& place);
  void copy_async(void* shared, const void* global, size_t num_read, Site site);
  void commit_copies() { running_->copies.commit(); }
  void wait_copies(size_t pending);
  [[noreturn]] void fault(const std::string& place, const std::string& what);
  [[noreturn]] void fault(Site site, const std::string& what) { fault(text(site), what); }

 private:
  static void thread_main();
  [[noreturn]] void exit_thread();
  size_t require_shared_16(const void* address, const char* operation, Site site);
  Moment moment();
  void open_barrier();
  void wait_for(const unsigned& generation, const char* operation, Site site);
  void run_next();
  [[noreturn]] void leave_block();
  std::string deadlock() const;

  Warp& own_warp() { return warps_[running_->position.rank / kLanes]; }

  const Launch& launch_;
  Body body_;
  const void* arguments_;
  Progress& progress_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<unsigned> turns_;    // threads in the order in which they take turns
  std::vector<unsigned> turn_of_;  // its inverse
  unsigned first_candidate_ = 0;   // greedy: threads whose turn is earlier cannot run
  SharedMemory shared_;
  RaceCheck races_;
  std::vector<Stack> stacks_;
  Fiber run_block_;  // where it waits for its threads
  Thread* running_ = nullptr;
  Barrier barrier_;
  unsigned block_barriers_ = 0;  // passed since the launch, the end of a block among them
  unsigned live_ = 0;  // threads that have not exited
};

}  // namespace simt
