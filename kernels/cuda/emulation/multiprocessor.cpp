#include "multiprocessor.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

namespace simt {
namespace {

enum Order : uint32_t { kAsNumbered, kReversed, kShuffled };

std::string text(Dim3 at) {
  return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
}

Dim3 dim3(const uint32_t (&sides)[3]) { return {sides[0], sides[1], sides[2]}; }

Dim3 unravel(unsigned index, const uint32_t (&sides)[3]) {
  return {index % sides[0], index / sides[0] % sides[1], index / sides[0] / sides[1]};
}

}  // namespace

std::vector<unsigned> arranged(const Launch& launch, size_t count, unsigned salt) {
  std::vector<unsigned> order(count);
  std::iota(order.begin(), order.end(), 0u);
  if (launch.order == kReversed) std::reverse(order.begin(), order.end());
  if (launch.order == kShuffled) std::shuffle(order.begin(), order.end(), std::minstd_rand(launch.seed + salt));
  return order;
}

Multiprocessor::Multiprocessor(const Launch& launch, Body body, const void* arguments, Progress& progress)
    : launch_(launch),
      body_(body),
      arguments_(arguments),
      progress_(progress),
      threads_(size_t(launch.block[0]) * launch.block[1] * launch.block[2]),
      warps_((threads_.size() + kLanes - 1) / kLanes),
      turn_of_(threads_.size()),
      shared_(launch.shared_bytes),
      races_(shared_.size()),
      stacks_(Stack::take(threads_.size())) {}

Multiprocessor::~Multiprocessor() {
  position = nullptr;
  Stack::give_back(std::move(stacks_));
}

void Multiprocessor::run_block(unsigned index) {
  const auto num_threads = unsigned(threads_.size());
  shared_.poison();
  barrier_ = {};
  ++block_barriers_;
  live_ = num_threads;
  for (Warp& warp : warps_) warp = {};
  turns_ = arranged(launch_, num_threads, index);
  for (unsigned turn = 0; turn < num_threads; ++turn) turn_of_[turns_[turn]] = turn;
  first_candidate_ = 0;
  const Dim3 block = unravel(index, launch_.grid);
  for (unsigned rank = 0; rank < num_threads; ++rank) {
    Thread& thread = threads_[rank];
    thread = {};
    thread.position = {unravel(rank, launch_.block), block, dim3(launch_.block), dim3(launch_.grid), int(rank), this};
    warps_[rank / kLanes].live |= 1u << rank % kLanes;
    stacks_[rank].prepare(thread.fiber, &Multiprocessor::thread_main);
  }
  running_ = nullptr;
  run_next();
}

void Multiprocessor::thread_main() {
  Multiprocessor& self = *position->multiprocessor;
  self.body_(self.arguments_);
  self.exit_thread();
}

// Exited threads are no longer waited for.
void Multiprocessor::exit_thread() {
  if (stacks_[running_->position.rank].overflowed()) fault(Site::here(), "the stack of a thread overflowed");
  commit_copies();  // what it has not waited for comes now, at the latest
  wait_copies(0);
  running_->exited = true;
  --live_;
  if (barrier_.arrived > 0 && barrier_.arrived == live_) open_barrier();
  Warp& warp = own_warp();
  warp.live &= ~(1u << running_->position.rank % kLanes);
  for (Exchange& each : warp.exchanges)
    if (each.arrived != 0 && each.arrived == (each.mask & warp.live)) warp.finish(each);
  first_candidate_ = 0;
  run_next();
  __builtin_unreachable();
}

// Switch to the thread whose turn it is among those that can run; to run_block if there is none.
void Multiprocessor::run_next() {
  Thread* const from = running_;
  const auto count = unsigned(turns_.size());
  const unsigned first = launch_.greedy ? first_candidate_ : from == nullptr ? 0 : turn_of_[from->position.rank] + 1;
  for (unsigned i = 0; i < count; ++i) {
    const unsigned turn = (first + i) % count;
    Thread& next = threads_[turns_[turn]];
    if (!next.can_run()) continue;
    first_candidate_ = turn;
    running_ = &next;
    position = &next.position;
    if (&next != from) switch_fiber(from != nullptr ? from->fiber : run_block_, next.fiber);
    return;
  }
  if (live_ > 0) progress_.fail(deadlock());
  leave_block();
}

// The fibers that are left behind are never switched to again.
void Multiprocessor::leave_block() {
  switch_fiber(running_->fiber, run_block_);
  __builtin_unreachable();
}

void Multiprocessor::fault(const std::string& place, const std::string& what) {
  progress_.fail(place + ": " + what + ", in block " + text(running_->position.block) + " thread " +
                 text(running_->position.thread));
  leave_block();
}

// Who waits where; neighbours in the same place are told together.
std::string Multiprocessor::deadlock() const {
  std::string told = "deadlock in block " + text(threads_[0].position.block);
  for (size_t first = 0, end; first < threads_.size(); first = end) {
    const Thread& thread = threads_[first];
    const auto is_alike = [&](const Thread& other) {
      return other.exited == thread.exited && (thread.exited || same(other.wait.site, thread.wait.site));
    };
    for (end = first + 1; end < threads_.size() && is_alike(threads_[end]);) ++end;
    told += "; threads " + std::to_string(first) + " to " + std::to_string(end - 1);
    told += thread.exited ? " have exited" : " are in " + (thread.wait.operation + (" at " + text(thread.wait.site)));
  }
  return told;
}

void Multiprocessor::wait_for(const unsigned& generation, const char* operation, Site site) {
  running_->wait = {&generation, generation, operation, site};
  run_next();
}

void Multiprocessor::block_barrier(Site site) {
  if (barrier_.arrived > 0 && !same(barrier_.site, site))
    fault(site, "divergent __syncthreads, where other threads of the block are at " + text(barrier_.site));
  barrier_.site = site;
  if (++barrier_.arrived < live_) {
    wait_for(barrier_.generation, "__syncthreads", site);
  } else {
    open_barrier();
  }
}

void Multiprocessor::open_barrier() {
  barrier_.open();
  ++block_barriers_;
  first_candidate_ = 0;
}

const Lanes& Multiprocessor::exchange(uint32_t mask, const void* bytes, size_t num_bytes, const char* operation,
                                      Site site, Combine combine) {
  const int own_lane = running_->position.rank % kLanes;
  if (!(mask >> own_lane & 1)) fault(site, std::string(operation) + " with a mask that leaves out its own lane");
  Exchange& exchange = own_warp().exchange_of(mask);
  if (exchange.arrived != 0 && !(same(exchange.site, site) && strcmp(exchange.operation, operation) == 0))
    fault(site, std::string("divergent ") + operation + ", where other lanes of the warp are in " +
                    exchange.operation + " at " + text(exchange.site));
  exchange.operation = operation;
  exchange.site = site;
  exchange.combine = combine;
  exchange.is_barrier = num_bytes == 0;
  Lanes& lanes = exchange.lanes();
  memcpy(lanes.bytes[own_lane], bytes, num_bytes);
  exchange.arrived |= 1u << own_lane;
  if (exchange.arrived != (mask & own_warp().live)) {
    wait_for(exchange.generation, operation, site);
  } else {
    own_warp().finish(exchange);
    first_candidate_ = 0;
  }
  return lanes;
}

unsigned char* Multiprocessor::dynamic_shared(size_t bytes, Site site) {
  if (bytes > shared_.dynamic_bytes())
    fault(site, "the kernel uses " + std::to_string(bytes) + " bytes of shared memory, and the launch gave " +
                    std::to_string(shared_.dynamic_bytes()));
  return shared_.dynamic();
}

size_t Multiprocessor::require_shared_16(const void* address, const char* operation, Site site) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0)
    fault(site, std::string(operation) + " of an address that is no multiple of 16");
  const ptrdiff_t offset = shared_.offset(address, 16);
  if (offset < 0) fault(site, std::string(operation) + " outside of shared memory");
  return size_t(offset);
}

Moment Multiprocessor::moment() {
  const int rank = running_->position.rank;
  return {block_barriers_, own_warp().barriers, rank / kLanes, rank};
}

void Multiprocessor::access(const void* address, size_t num_bytes, Access access, const Place& place) {
  const ptrdiff_t offset = shared_.offset(address, num_bytes);
  if (offset < 0) return;
  const std::string wrong = races_.look(size_t(offset), num_bytes, access, moment(), place);
  if (!wrong.empty()) fault(text(place), wrong);
}

void Multiprocessor::read_shared_16(const void* address, const char* operation, Site site) {
  require_shared_16(address, operation, site);
  access(address, 16, Access::kRead, {site});
}

void Multiprocessor::copy_async(void* shared, const void* global, size_t num_read, Site site) {
  require_shared_16(shared, "cp_async_16", site);
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0)
    fault(site, "cp_async_16 from an address that is no multiple of 16");
  access(shared, 16, Access::kAsyncWrite, {site});
  const AsyncCopies::Copy copy = {shared, global, num_read, launch_.eager_copies != 0};
  if (copy.is_done) copy.perform();
  running_->copies.start(copy);
}

void Multiprocessor::wait_copies(size_t pending) {
  running_->copies.wait(pending, [&](const AsyncCopies::Copy& copy) {
    races_.arrive(size_t(shared_.offset(copy.shared, 16)), 16, moment());
  });
}

}  // namespace simt
