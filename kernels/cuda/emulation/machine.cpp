// The emulated GPU: every CUDA thread is a fiber, every block runs on one OS thread.
#include "machine.h"

#include <link.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fibers.h"

namespace simt {

__thread const Position* position = nullptr;

namespace {

constexpr unsigned char kPoison = 0xff;  // NaN as float32, bfloat16 and float16; -1 as an integer
constexpr size_t kSharedAlignment = 128;

// What a thread waits for: that a generation ends.
struct Wait {
  const unsigned* generation = nullptr;
  unsigned seen = 0;
  const char* operation = "";
  Site site{};

  bool over() const { return generation == nullptr || *generation != seen; }
};

struct Copy {
  void* shared;
  const void* global;
  size_t num_read;
  Site site;
};

struct Thread {
  Fiber fiber;
  Position position{};
  bool exited = false;
  Wait wait;
  std::deque<Copy> copies;    // started, not yet done
  std::deque<size_t> groups;  // how many of them each commit closed, oldest first

  bool can_run() const { return !exited && wait.over(); }
};

struct Barrier {
  unsigned generation = 0;
  unsigned arrived = 0;
  Site site{};
};

// An exchange among the lanes of one mask. Two buffers: while some lanes still read the result of one
// generation, others may already lay down for the next; the one after that needs them all.
struct Exchange {
  explicit Exchange(uint32_t lanes) : mask(lanes) {}

  uint32_t mask;
  uint32_t arrived = 0;
  unsigned generation = 0;
  const char* operation = "";
  Site site{};
  Combine combine = nullptr;
  Lanes buffers[2];

  void finish() {
    Lanes& lanes = buffers[generation % 2];
    lanes.present = arrived;
    if (combine != nullptr) combine(lanes);
    arrived = 0;
    ++generation;
  }
};

struct Warp {
  uint32_t live = 0;  // lanes that have not exited
  std::deque<Exchange> exchanges;

  Exchange& of(uint32_t mask) {
    for (Exchange& each : exchanges)
      if (each.mask == mask) return each;
    return exchanges.emplace_back(mask);
  }
};

// Static shared memory is the thread-local storage of this library: nothing else in it is thread-local but
// `position`. So it can be found, and poisoned before every block as dynamic shared memory is.
struct StaticShared {
  unsigned char* begin = nullptr;
  size_t bytes = 0;

  static StaticShared of_this_thread() {
    position = nullptr;  // the storage of a thread comes into being when it is touched
    StaticShared found;
    dl_iterate_phdr(&StaticShared::look, &found);
    return found;
  }

  void poison() const {
    const Position* kept = position;
    memset(begin, kPoison, bytes);
    position = kept;
  }

 private:
  static int look(dl_phdr_info* object, size_t, void* found) {
    const auto own = reinterpret_cast<uintptr_t>(&position);
    for (int i = 0; i < object->dlpi_phnum; ++i) {
      const auto& segment = object->dlpi_phdr[i];
      const auto begin = reinterpret_cast<uintptr_t>(object->dlpi_tls_data);
      if (segment.p_type != PT_TLS || own - begin >= segment.p_memsz) continue;
      *static_cast<StaticShared*>(found) = {static_cast<unsigned char*>(object->dlpi_tls_data),
                                            segment.p_memsz};
      return 1;
    }
    return 0;
  }
};

// What the OS threads of one launch share.
struct Progress {
  std::atomic<unsigned> next_block{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::string report;

  void fail(const std::string& message) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!failed.exchange(true)) report = message;
  }
};

// Stacks outlive a launch: to map them anew each time would cost more than most kernels.
class StackPool {
 public:
  std::vector<Stack> take(size_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Stack> taken;
    for (; taken.size() < count && !free_.empty(); free_.pop_back()) taken.push_back(std::move(free_.back()));
    while (taken.size() < count) taken.emplace_back();
    return taken;
  }

  void give(std::vector<Stack> stacks) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Stack& stack : stacks)
      if (!stack.overflowed()) free_.push_back(std::move(stack));
  }

 private:
  std::mutex mutex_;
  std::vector<Stack> free_;
};

StackPool stack_pool;

std::string at(Site site) { return std::string(site.file) + ":" + std::to_string(site.line); }

std::string text(Dim3 at) {
  return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
}

bool same(Site one, Site other) { return one.line == other.line && strcmp(one.file, other.file) == 0; }

std::vector<unsigned> in_order_of(const Launch& launch, size_t count, unsigned salt) {
  std::vector<unsigned> order(count);
  std::iota(order.begin(), order.end(), 0u);
  if (launch.order == 1) std::reverse(order.begin(), order.end());
  if (launch.order == 2) std::shuffle(order.begin(), order.end(), std::mt19937(launch.seed + salt));
  return order;
}

Dim3 unravel(unsigned index, const uint32_t (&extent)[3]) {
  return {index % extent[0], index / extent[0] % extent[1], index / extent[0] / extent[1]};
}

}  // namespace

// Runs blocks, one after another, on the OS thread that made it.
class Multiprocessor {
 public:
  Multiprocessor(const Launch& launch, void (*body)(const void*), const void* arguments, Progress& progress)
      : launch_(launch),
        body_(body),
        arguments_(arguments),
        progress_(progress),
        threads_(size_t(launch.block[0]) * launch.block[1] * launch.block[2]),
        warps_((threads_.size() + kLanes - 1) / kLanes),
        turn_of_(threads_.size()),
        shared_storage_(launch.shared_bytes + kSharedAlignment),
        static_shared_(StaticShared::of_this_thread()),
        stacks_(stack_pool.take(threads_.size())) {
    void* aligned = shared_storage_.data();
    size_t room = shared_storage_.size();
    shared_ = static_cast<unsigned char*>(std::align(kSharedAlignment, launch.shared_bytes, aligned, room));
  }

  ~Multiprocessor() {
    position = nullptr;
    stack_pool.give(std::move(stacks_));
  }

  void run_block(unsigned index);

  // Of the thread that runs now.
  void block_barrier(Site site);
  const Lanes& exchange(uint32_t mask, const void* bytes, size_t num_bytes, const char* operation, Site site,
                        Combine combine);
  unsigned char* dynamic_shared(size_t bytes, Site site);
  bool is_shared(const void* address, size_t bytes) const;
  void copy_async(const Copy& copy);
  void commit_copies();
  void wait_copies(size_t pending);
  [[noreturn]] void fault(Site site, const std::string& what);

 private:
  static void thread_main();
  void exit_thread();
  void wait_for(const unsigned& generation, const char* operation, Site site);
  void run_next();
  [[noreturn]] void stop();
  std::string stuck() const;

  const Launch& launch_;
  void (*body_)(const void*);
  const void* arguments_;
  Progress& progress_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<unsigned> turns_;    // threads in the order in which they take turns
  std::vector<unsigned> turn_of_;  // its inverse
  std::vector<unsigned char> shared_storage_;
  unsigned char* shared_ = nullptr;
  StaticShared static_shared_;
  std::vector<Stack> stacks_;
  Fiber scheduler_;
  Thread* running_ = nullptr;
  Barrier barrier_;
  unsigned live_ = 0;
};

void Multiprocessor::run_block(unsigned index) {
  const Dim3 block = unravel(index, launch_.grid);
  const auto num_threads = unsigned(threads_.size());
  std::fill(shared_storage_.begin(), shared_storage_.end(), kPoison);
  static_shared_.poison();
  barrier_ = {};
  live_ = num_threads;
  for (Warp& warp : warps_) warp = {};
  turns_ = in_order_of(launch_, num_threads, index);
  for (unsigned turn = 0; turn < num_threads; ++turn) turn_of_[turns_[turn]] = turn;
  for (unsigned rank = 0; rank < num_threads; ++rank) {
    Thread& thread = threads_[rank];
    thread = {};
    thread.position = {unravel(rank, launch_.block),
                       block,
                       {launch_.block[0], launch_.block[1], launch_.block[2]},
                       {launch_.grid[0], launch_.grid[1], launch_.grid[2]},
                       int(rank),
                       this};
    warps_[rank / kLanes].live |= 1u << rank % kLanes;
    stacks_[rank].prepare(thread.fiber, &Multiprocessor::thread_main);
  }
  running_ = nullptr;
  run_next();
}

// Every thread begins here, and is left for good in exit_thread.
void Multiprocessor::thread_main() {
  Multiprocessor& self = *position->multiprocessor;
  self.body_(self.arguments_);
  self.exit_thread();
}

// Who has exited is no longer waited for.
void Multiprocessor::exit_thread() {
  const int rank = running_->position.rank;
  running_->exited = true;
  --live_;
  if (barrier_.arrived > 0 && barrier_.arrived >= live_) {
    barrier_.arrived = 0;
    ++barrier_.generation;
  }
  Warp& warp = warps_[rank / kLanes];
  warp.live &= ~(1u << rank % kLanes);
  for (Exchange& each : warp.exchanges)
    if (each.arrived != 0 && each.arrived == (each.mask & warp.live)) each.finish();
  run_next();
}

// Switch to the thread whose turn it is among those that can run; back to run_block if there is none.
void Multiprocessor::run_next() {
  Thread* const from = running_;
  Fiber& leaving = from != nullptr ? from->fiber : scheduler_;
  if (from != nullptr && stacks_[from->position.rank].overflowed())
    fault(from->wait.site, "the stack of the thread overflowed");
  const auto count = unsigned(turns_.size());
  const unsigned first = from == nullptr || launch_.greedy ? 0 : turn_of_[from->position.rank] + 1;
  for (unsigned i = 0; i < count; ++i) {
    Thread& next = threads_[turns_[(first + i) % count]];
    if (!next.can_run()) continue;
    running_ = &next;
    position = &next.position;
    if (&next != from) switch_fiber(leaving, next.fiber);
    return;
  }
  if (live_ > 0) progress_.fail(stuck());
  stop();
}

// Back to run_block, for good.
void Multiprocessor::stop() {
  Fiber abandoned;
  Fiber& leaving = running_ != nullptr ? running_->fiber : abandoned;
  switch_fiber(leaving, scheduler_);
  __builtin_unreachable();
}

void Multiprocessor::fault(Site site, const std::string& what) {
  progress_.fail(at(site) + ": " + what + ", in block " + text(running_->position.block) + " thread " +
                 text(running_->position.thread));
  stop();
}

// Who waits where, threads of the same place together.
std::string Multiprocessor::stuck() const {
  std::string told = "deadlock in block " + text(threads_[0].position.block);
  for (size_t rank = 0, end; rank < threads_.size(); rank = end) {
    const Thread& thread = threads_[rank];
    const auto alike = [&](const Thread& other) {
      return other.exited == thread.exited && same(other.wait.site, thread.wait.site);
    };
    for (end = rank + 1; end < threads_.size() && alike(threads_[end]);) ++end;
    told += "; threads " + std::to_string(rank) + " to " + std::to_string(end - 1) +
            (thread.exited ? " have exited" : " wait at " + at(thread.wait.site) + " in " + thread.wait.operation);
  }
  return told;
}

void Multiprocessor::wait_for(const unsigned& generation, const char* operation, Site site) {
  running_->wait = {&generation, generation, operation, site};
  run_next();
}

void Multiprocessor::block_barrier(Site site) {
  if (barrier_.arrived > 0 && !same(barrier_.site, site))
    fault(site, "divergent __syncthreads: other threads of the block are at " + at(barrier_.site));
  barrier_.site = site;
  running_->wait.site = site;
  if (++barrier_.arrived < live_) return wait_for(barrier_.generation, "__syncthreads", site);
  barrier_.arrived = 0;
  ++barrier_.generation;
}

const Lanes& Multiprocessor::exchange(uint32_t mask, const void* bytes, size_t num_bytes,
                                      const char* operation, Site site, Combine combine) {
  const int lane = running_->position.rank % kLanes;
  Warp& warp = warps_[running_->position.rank / kLanes];
  if (!(mask >> lane & 1)) fault(site, std::string(operation) + " with a mask without the calling lane");
  Exchange& mine = warp.of(mask);
  if (mine.arrived != 0 && !(same(mine.site, site) && strcmp(mine.operation, operation) == 0))
    fault(site, std::string("divergent ") + operation + ": other lanes of the warp are in " + mine.operation +
                    " at " + at(mine.site));
  mine.operation = operation;
  mine.site = site;
  mine.combine = combine;
  running_->wait.site = site;
  Lanes& lanes = mine.buffers[mine.generation % 2];
  memcpy(lanes.bytes[lane], bytes, num_bytes);
  mine.arrived |= 1u << lane;
  if (mine.arrived == (mask & warp.live))
    mine.finish();
  else
    wait_for(mine.generation, operation, site);
  return lanes;
}

unsigned char* Multiprocessor::dynamic_shared(size_t bytes, Site site) {
  if (bytes > launch_.shared_bytes)
    fault(site, "the kernel uses " + std::to_string(bytes) + " bytes of shared memory, the launch gave " +
                    std::to_string(launch_.shared_bytes));
  return shared_;
}

bool Multiprocessor::is_shared(const void* address, size_t bytes) const {
  const auto inside = [&](const unsigned char* begin, size_t size) {
    const auto offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(begin);
    return offset < size && size - offset >= bytes;
  };
  return inside(shared_, launch_.shared_bytes) || inside(static_shared_.begin, static_shared_.bytes);
}

namespace {

void perform(const Copy& copy, size_t bytes) {
  auto* to = static_cast<unsigned char*>(copy.shared);
  if (copy.num_read > 0) memcpy(to, copy.global, copy.num_read);
  memset(to + copy.num_read, 0, bytes - copy.num_read);
}

}  // namespace

void Multiprocessor::copy_async(const Copy& copy) {
  if (launch_.eager_copies)
    perform(copy, 16);
  else
    running_->copies.push_back(copy);
}

void Multiprocessor::commit_copies() {
  const auto& groups = running_->groups;
  const size_t closed = std::accumulate(groups.begin(), groups.end(), size_t(0));
  running_->groups.push_back(running_->copies.size() - closed);
}

void Multiprocessor::wait_copies(size_t pending) {
  Thread& thread = *running_;
  for (; thread.groups.size() > pending; thread.groups.pop_front())
    for (size_t left = thread.groups.front(); left > 0; --left) {
      perform(thread.copies.front(), 16);
      thread.copies.pop_front();
    }
}

void block_barrier(Site site) { position->multiprocessor->block_barrier(site); }

const Lanes& exchange(uint32_t mask, const void* bytes, size_t num_bytes, const char* operation, Site site,
                      Combine combine) {
  return position->multiprocessor->exchange(mask, bytes, num_bytes, operation, site, combine);
}

unsigned char* dynamic_shared(size_t bytes, Site site) {
  return position->multiprocessor->dynamic_shared(bytes, site);
}

void require_shared_16(const void* address, const char* operation, Site site) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0)
    fault(site, (std::string("misaligned ") + operation).c_str());
  if (!position->multiprocessor->is_shared(address, 16))
    fault(site, (std::string(operation) + " outside of shared memory").c_str());
}

void copy_async(void* shared, const void* global, size_t num_read, Site site) {
  require_shared_16(shared, "cp_async_16", site);
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0) fault(site, "misaligned cp_async_16 source");
  position->multiprocessor->copy_async({shared, global, num_read, site});
}

void commit_copies() { position->multiprocessor->commit_copies(); }

void wait_copies(size_t pending) { position->multiprocessor->wait_copies(pending); }

void fault(Site site, const char* what) { position->multiprocessor->fault(site, what); }

int run(const Launch& launch, void (*body)(const void*), const void* arguments, char* report,
        size_t report_bytes) {
  Progress progress;
  const unsigned num_blocks = launch.grid[0] * launch.grid[1] * launch.grid[2];
  const std::vector<unsigned> blocks = in_order_of(launch, num_blocks, 0);
  const auto work = [&] {
    Multiprocessor multiprocessor(launch, body, arguments, progress);
    for (unsigned turn; !progress.failed && (turn = progress.next_block++) < num_blocks;)
      multiprocessor.run_block(blocks[turn]);
  };
  std::vector<std::thread> helpers;
  for (unsigned i = 1; i < launch.os_threads; ++i) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
  if (!progress.failed) return 0;
  snprintf(report, report_bytes, "%s", progress.report.c_str());
  return 1;
}

}  // namespace simt
