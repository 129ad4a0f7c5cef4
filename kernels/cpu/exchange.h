// Bytes from every rank to every rank of one machine, through memory that their processes share.
//
// A region is, each begun at a multiple of 64 bytes,
//
//   places   [ranks] of Place
//   slots    [2][ranks][slot_bytes]
//
// Exchanges are numbered from 1, and all ranks make the same ones. In one, a rank writes its bytes into its slot
// of the exchange's parity, publishes the number, waits until the others have, and reads their slots. That two
// slots are enough: who writes exchange n + 2 has seen everyone publish n + 1, and so everyone has read n.
//
// Who waits spins for SPIN, since ranks do the same work at the same time, then sleeps in the kernel.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>
#include <thread>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pageturner {

struct alignas(64) Place {
  std::atomic<std::uint32_t> published;  // of the exchange that this rank wrote last
  std::atomic<std::uint32_t> sleepers;   // that wait for it
  std::atomic<std::uint32_t> left;       // not 0: it makes no more of them
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

// Mirrored by ctypes in exchange.py.
struct Region {
  char* memory;
  std::int64_t slot_bytes;  // a multiple of 64
  std::int32_t rank, ranks;
};

enum Outcome : int { ALL_THERE = 0, STILL_WAITING = 1, SOMEONE_LEFT = 2 };

inline Place& place(const Region& region, int rank) { return reinterpret_cast<Place*>(region.memory)[rank]; }

inline char* slot(const Region& region, std::uint32_t number, int rank) {
  char* slots = region.memory + region.ranks * sizeof(Place);
  return slots + ((number & 1) * region.ranks + rank) * region.slot_bytes;
}

inline void wake_sleepers(Place& place) {
#if defined(__linux__)
  if (place.sleepers.load()) syscall(SYS_futex, &place.published, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

// `bytes` is at most slot_bytes, as in collect.
inline void publish(const Region& region, std::uint32_t number, const void* mine, std::int64_t bytes) {
  std::memcpy(slot(region, number, region.rank), mine, bytes);
  Place& own = place(region, region.rank);
  own.published.store(number);
  wake_sleepers(own);
}

// Numbers wrap around; no two ranks are more than one apart.
inline bool has_published(const Place& place, std::uint32_t number) {
  return std::int32_t(place.published.load(std::memory_order_acquire) - number) >= 0;
}

class Waiting {
 public:
  explicit Waiting(std::chrono::microseconds patience) : deadline(Clock::now() + patience) {}

  // Until the rank has published, or left, or patience is over.
  Outcome wait(Place& other, std::uint32_t number) const {
    const auto spun = std::min(deadline, Clock::now() + SPIN);
    while (true) {
      for (int i = 0; i < LOOKS; i++)
        if (has_published(other, number)) return ALL_THERE;
      if (other.left.load()) return has_published(other, number) ? ALL_THERE : SOMEONE_LEFT;
      const auto now = Clock::now();
      if (now >= deadline) return STILL_WAITING;
      if (now >= spun) sleep(other, number, deadline - now);
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto SPIN = std::chrono::microseconds(50);
  static constexpr int LOOKS = 64;  // between two looks at the clock

  static void sleep(Place& other, std::uint32_t number, std::chrono::nanoseconds most) {
#if defined(__linux__)
    other.sleepers.fetch_add(1);
    const std::uint32_t seen = other.published.load();
    if (std::int32_t(seen - number) < 0 && !other.left.load()) {
      timespec time{most.count() / 1000000000, most.count() % 1000000000};
      syscall(SYS_futex, &other.published, FUTEX_WAIT, seen, &time, nullptr, 0);
    }
    other.sleepers.fetch_sub(1);
#else
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(most, std::chrono::microseconds(50)));
#endif
  }

  const Clock::time_point deadline;
};

// gathered [ranks], each at a distance of `stride` bytes: what all ranks wrote. Written only if all are there.
inline Outcome collect(const Region& region, std::uint32_t number, std::int64_t bytes, char* gathered,
                       std::int64_t stride, std::int64_t patience_us) {
  const Waiting waiting{std::chrono::microseconds(patience_us)};
  for (int rank = 0; rank < region.ranks; rank++)
    if (const Outcome outcome = waiting.wait(place(region, rank), number)) return outcome;
  for (int rank = 0; rank < region.ranks; rank++)
    std::memcpy(gathered + rank * stride, slot(region, number, rank), bytes);
  return ALL_THERE;
}

// The rank's last word. Whoever waits for it is told.
inline void leave(const Region& region) {
  Place& own = place(region, region.rank);
  own.left.store(1);
#if defined(__linux__)
  syscall(SYS_futex, &own.published, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

}  // namespace pageturner
