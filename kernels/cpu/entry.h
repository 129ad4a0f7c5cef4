// What every entry of this library does: no exception may leave C++, so that each returns a status.
#pragma once

#include <new>

#include "team.h"

namespace pageturner {

// Mirrored in entry.py.
enum Status { DONE = 0, NO_MEMORY = 1 };

// f(), and how that ended. Where memory was lacking its results are not to be used, and it may be called again.
template <class F>
int entered(const F& f) noexcept {
  try {
    f();
    return DONE;
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

// f(team) on torch's threads.
template <class F>
int on_openmp(int num_threads, const F& f) noexcept {
  return entered([&] {
    OpenMpTeam team(num_threads);
    f(team);
  });
}

}  // namespace pageturner
