// The threads that share an operation's pieces, and the barrier at its end.
//
// An operation is written once, against Team, and runs on either provider:
//   OpenMpTeam  one OpenMP region an operation, for operations called one by one beside torch's own
//               products: it is torch's team, and a second one beside it would make both wake up cold.
//   ThreadTeam  threads of its own (thread_team.h), for a whole forward in one call, where hundreds of
//               barriers follow each other within microseconds.
//
// Pieces are claimed one by one as threads come free. A piece should take some microseconds, and an
// operation should have several for each thread: one thread may be slower, or not scheduled at all.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace pageturner {

class Team {
 public:
  virtual ~Team() = default;

  // Threads that share the pieces, the caller included.
  virtual int size() const = 0;

  // Numbers that one simple operation must take in to be worth a second thread.
  virtual std::int64_t worth_a_thread() const = 0;

  // f(i) for every i in [0, count), in no order and on any thread, and returns when all are done. A single
  // piece runs on the caller at once. f may throw std::bad_alloc alone, which is thrown here when all have ended.
  template <class F>
  void for_each(std::int64_t count, const F& f) {
    if (count <= 1 || size() == 1) {
      for (std::int64_t i = 0; i < count; i++) f(i);
      return;
    }
    const Guarded<F> guarded{f};
    run({count, [](const void* f, std::int64_t i) { (*static_cast<const Guarded<F>*>(f))(i); }, &guarded});
    if (guarded.lacked_memory) throw std::bad_alloc();
  }

  // f(begin, end) over [0, count) in stretches of some `least` items each, at most PIECES a thread, and as many
  // for one thread as for another. least: as many items as pay for a second thread.
  template <class F>
  void for_each_stretch(std::int64_t count, std::int64_t least, const F& f) {
    std::int64_t pieces = std::min((count + least - 1) / least, PIECES * size());
    if (pieces > size()) pieces = std::min((pieces + size() - 1) / size() * size(), count);
    for_each(pieces, [&](std::int64_t i) { f(i * count / pieces, (i + 1) * count / pieces); });
  }

 protected:
  struct Work {
    std::int64_t count;
    void (*call)(const void* f, std::int64_t i);
    const void* f;
  };

  // What for_each promises, for count > 1.
  virtual void run(const Work& work) = 0;

 private:
  static constexpr std::int64_t PIECES = 4;

  // f, whose exception must not leave the thread that it happens in.
  template <class F>
  struct Guarded {
    const F& f;
    mutable std::atomic<bool> lacked_memory{false};

    void operator()(std::int64_t i) const {
      try {
        f(i);
      } catch (const std::bad_alloc&) {
        lacked_memory = true;
      }
    }
  };
};

// Memory of the calling thread for the piece at hand, `floats` long and holding anything. It lasts until the
// thread asks again.
inline float* scratch(std::size_t floats) {
  thread_local std::vector<float> memory;
  if (memory.size() < floats) memory.resize(floats);
  return memory.data();
}

class OpenMpTeam final : public Team {
 public:
  explicit OpenMpTeam(int size) : threads(size) {}
  int size() const override { return threads; }
  std::int64_t worth_a_thread() const override { return 1 << 14; }

 private:
  void run(const Work& work) override {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (std::int64_t i = 0; i < work.count; i++) work.call(work.f, i);
  }

  const int threads;
};

}  // namespace pageturner
