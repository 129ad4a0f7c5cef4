// Finds races on shared memory: two accesses of which one writes, by two threads, with no barrier between them. The
// result of a run may be right all the same, under every schedule that was tried.
//
// An access is ordered before a later one of another thread if the block has passed a __syncthreads between them, or
// if both are of one warp and that has passed a __syncwarp. Shuffles, votes and products order nothing. After
// FastTrack (Flanagan and Freund 2009), where the barriers of block and warp make two counters of its clocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "machine.h"

namespace simt {

// Of an access: the barriers that its thread has passed, and whose it is.
struct Moment {
  unsigned block_barriers;  // from 1 on, counted over all blocks, so that one block comes after the other
  unsigned warp_barriers;
  int warp;
  int rank;
};

// Where in the kernel: a line, or where no line is known the address in its code, for who can look that up.
struct Place {
  Site site{};
  const void* code = nullptr;
};

std::string text(const Place& place);

enum class Access { kRead, kWrite, kAsyncWrite };

class RaceCheck {
 public:
  explicit RaceCheck(size_t num_bytes) : cells_((num_bytes + kGranuleBytes - 1) / kGranuleBytes) {}

  // What is wrong with an access to `num_bytes` from `offset` on; empty if nothing is.
  std::string look(size_t offset, size_t num_bytes, Access access, const Moment& now, const Place& place);

  // The asynchronous write is done: from here on it is an ordinary one, of this moment.
  void arrive(size_t offset, size_t num_bytes, const Moment& now);

 private:
  static constexpr size_t kGranuleBytes = 2;  // the smallest element that kernels share
  static constexpr int kSeveral = -1;

  struct Event {
    Moment moment{0, 0, kSeveral, kSeveral};
    Place place;

    bool has_happened() const { return moment.block_barriers > 0; }
    bool is_ordered_before(const Moment& now) const;
  };

  struct Cell {
    Event write, read;  // the last write; of the reads, those that a write may still race with, taken together
    bool is_underway = false;  // the write is asynchronous and has not been waited for
  };

  static void note_read(Event& reads, const Moment& now, const Place& place);

  std::vector<Cell> cells_;
};

}  // namespace simt
