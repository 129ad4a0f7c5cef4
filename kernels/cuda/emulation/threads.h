// What the machine knows of the threads of a block, and of what they wait for.
#pragma once

#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "fibers.h"
#include "machine.h"

namespace simt {

std::string text(Site site);

inline bool same(Site one, Site other) { return one.line == other.line && strcmp(one.file, other.file) == 0; }

// That a generation of a barrier or an exchange ends.
struct Wait {
  const unsigned* generation = nullptr;
  unsigned seen = 0;
  const char* operation = "";
  Site site{};

  bool over() const { return generation == nullptr || *generation != seen; }
};

// The asynchronous copies of one thread that are started and not waited for. The first groups are the oldest.
class AsyncCopies {
 public:
  struct Copy {
    void* shared;
    const void* global;
    size_t num_read;
    bool is_done;  // as soon as it was started

    void perform() const {
      if (num_read > 0) memcpy(shared, global, num_read);
      memset(static_cast<unsigned char*>(shared) + num_read, 0, 16 - num_read);
    }
  };

  void start(const Copy& copy) { open_.push_back(copy); }

  void commit() {
    groups_.push_back(open_);
    open_.clear();
  }

  template <class Arrived> void wait(size_t pending, const Arrived& arrived) {
    for (; groups_.size() > pending; groups_.pop_front()) {
      for (const Copy& copy : groups_.front()) {
        if (!copy.is_done) copy.perform();
        arrived(copy);
      }
    }
  }

 private:
  std::deque<std::vector<Copy>> groups_;
  std::vector<Copy> open_;
};

struct Thread {
  Fiber fiber;
  Position position{};
  bool exited = false;
  Wait wait;
  AsyncCopies copies;

  bool can_run() const { return !exited && wait.over(); }
};

// __syncthreads.
struct Barrier {
  unsigned generation = 0;
  unsigned arrived = 0;
  Site site{};

  void open() {
    arrived = 0;
    ++generation;
  }
};

// An exchange among the lanes of one mask. Two buffers: while some lanes still read the result of one generation,
// others may already lay down for the next; the one after that needs them all.
struct Exchange {
  explicit Exchange(uint32_t lanes) : mask(lanes) {}

  uint32_t mask;
  uint32_t arrived = 0;
  unsigned generation = 0;
  const char* operation = "";
  Site site{};
  Combine combine = nullptr;
  bool is_barrier = false;  // nothing is laid down
  Lanes buffers[2];

  Lanes& lanes() { return buffers[generation % 2]; }

  void finish() {
    lanes().present = arrived;
    if (combine != nullptr) combine(lanes());
    arrived = 0;
    ++generation;
  }
};

struct Warp {
  uint32_t live = 0;      // lanes that have not exited
  unsigned barriers = 0;  // that it has passed
  std::deque<Exchange> exchanges;

  Exchange& exchange_of(uint32_t mask) {
    for (Exchange& each : exchanges)
      if (each.mask == mask) return each;
    return exchanges.emplace_back(mask);
  }

  void finish(Exchange& exchange) {
    if (exchange.is_barrier) ++barriers;
    exchange.finish();
  }
};

}  // namespace simt
