#include "machine.h"

#include <cstdio>
#include <thread>
#include <vector>

#include "multiprocessor.h"

namespace simt {

void block_barrier(Site site) { position->multiprocessor->block_barrier(site); }

const Lanes& exchange(uint32_t mask, const void* bytes, size_t num_bytes, const char* operation, Site site,
                      Combine combine) {
  return position->multiprocessor->exchange(mask, bytes, num_bytes, operation, site, combine);
}

unsigned char* dynamic_shared(size_t bytes, Site site) {
  return position->multiprocessor->dynamic_shared(bytes, site);
}

void read_shared_16(const void* address, const char* operation, Site site) {
  position->multiprocessor->read_shared_16(address, operation, site);
}

void access(const void* address, size_t num_bytes, bool is_write, const void* code) {
  position->multiprocessor->access(address, num_bytes, is_write ? Access::kWrite : Access::kRead, {{}, code});
}

void copy_async(void* shared, const void* global, size_t num_read, Site site) {
  position->multiprocessor->copy_async(shared, global, num_read, site);
}

void commit_copies() { position->multiprocessor->commit_copies(); }

void wait_copies(size_t pending) { position->multiprocessor->wait_copies(pending); }

void fault(Site site, const char* what, const char* more) {
  position->multiprocessor->fault(site, std::string(what) + more);
}

int run(const Launch& launch, void (*body)(const void*), const void* arguments, char* report,
        size_t report_bytes) {
  Progress progress;
  const unsigned num_blocks = launch.grid[0] * launch.grid[1] * launch.grid[2];
  const std::vector<unsigned> blocks = arranged(launch, num_blocks, 0);
  const auto run_blocks = [&] {
    Multiprocessor multiprocessor(launch, body, arguments, progress);
    for (unsigned turn; !progress.failed && (turn = progress.next_block++) < num_blocks;)
      multiprocessor.run_block(blocks[turn]);
  };
  std::vector<std::thread> helpers;
  for (unsigned i = 1; i < launch.os_threads; ++i) helpers.emplace_back(run_blocks);
  run_blocks();
  for (std::thread& helper : helpers) helper.join();
  if (!progress.failed) return 0;
  snprintf(report, report_bytes, "%s", progress.report.c_str());
  return 1;
}

}  // namespace simt
