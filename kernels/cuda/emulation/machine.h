// What the emulated GPU offers to the text of a kernel: barriers, exchanges in a warp, asynchronous copies.
// simt.h and primitives.h give these CUDA's names.
#pragma once

#include <cstddef>
#include <cstdint>

namespace simt {

constexpr int kLanes = 32;

// A place in a kernel's source: as a default argument, that of the call.
struct Site {
  const char* file;
  int line;

  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

struct Dim3 {
  unsigned x, y, z;
};

class Multiprocessor;

// The thread that runs now on this OS thread.
struct Position {
  Dim3 thread, block, block_dim, grid_dim;
  int rank;  // in its block, x fastest
  Multiprocessor* multiprocessor;
};

// The only thread-local variable beside the kernels' static shared memory (see shared_memory.cpp).
extern __thread const Position* position;

inline int lane() { return position->rank % kLanes; }

// What each lane of a warp laid down for the others, or what a Combine made of it.
struct Lanes {
  static constexpr size_t kBytes = 32;
  alignas(16) unsigned char bytes[kLanes][kBytes];
  uint32_t present;  // lanes that took part
};

// Turns what the lanes laid down into what they take up; runs once, when the last of them has come.
using Combine = void (*)(Lanes&);

// __syncthreads.
void block_barrier(Site site);

// Every lane of `mask` that has not exited lays down `num_bytes`; all go on when the last of them has come. The result
// is good until the next exchange of the same mask. Of 0 bytes it is __syncwarp: it orders accesses to memory as well.
const Lanes& exchange(uint32_t mask, const void* bytes, size_t num_bytes, const char* operation, Site site,
                      Combine combine = nullptr);

// Dynamic shared memory. A fault if the launch gave less than `bytes`.
unsigned char* dynamic_shared(size_t bytes, Site site);

// A fault unless `address` is a multiple of 16, and 16 bytes from there are shared memory of this block, which may be
// read now.
void read_shared_16(const void* address, const char* operation, Site site);

// Before the text of a kernel reads or writes: a fault if that is shared memory and the access is a race. code: where.
void access(const void* address, size_t num_bytes, bool is_write, const void* code);

// 16 bytes to shared memory, of which `num_read` are read and the rest zeros: at wait_copies, or at once.
void copy_async(void* shared, const void* global, size_t num_read, Site site);
void commit_copies();
void wait_copies(size_t pending);

// Ends the launch with a message that names the place and the thread. Does not return, and does not unwind.
[[noreturn]] void fault(Site site, const char* what, const char* more = "");

// One launch, as the caller describes it. Mirrored in runtime.py.
struct Launch {
  uint32_t grid[3], block[3];
  uint64_t shared_bytes;
  uint32_t order;  // of the threads, and of the blocks: 0 as numbered, 1 reversed, 2 shuffled by seed
  uint32_t seed;
  uint32_t greedy;        // the first thread that can run does; otherwise they take turns
  uint32_t eager_copies;  // asynchronous copies happen when started, instead of when waited for
  uint32_t os_threads;    // blocks in parallel
};

// Runs `body(arguments)` as every thread of the grid. Returns 0, or 1 with the reason in `report`.
int run(const Launch& launch, void (*body)(const void*), const void* arguments, char* report,
        size_t report_bytes);

}  // namespace simt
