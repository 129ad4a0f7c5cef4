#include "race_check.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>

namespace simt {

std::string text(Site site) {
  const char* slash = strrchr(site.file, '/');
  return std::string(slash != nullptr ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

std::string text(const Place& place) {
  if (place.code == nullptr) return text(place.site);
  Dl_info library{};
  dladdr(place.code, &library);
  char offset[32];
  // The address is where a call returns to; the byte before it belongs to the call.
  snprintf(offset, sizeof offset, "code+0x%zx",
           size_t(static_cast<const char*>(place.code) - static_cast<const char*>(library.dli_fbase) - 1));
  return offset;
}

bool RaceCheck::Event::is_ordered_before(const Moment& now) const {
  if (moment.block_barriers < now.block_barriers) return true;
  if (moment.warp != now.warp) return false;
  return moment.warp_barriers < now.warp_barriers || moment.rank == now.rank;
}

void RaceCheck::note_read(Event& reads, const Moment& now, const Place& place) {
  Moment& moment = reads.moment;
  const bool is_same_block_moment = moment.block_barriers == now.block_barriers;
  if (is_same_block_moment && moment.warp != now.warp) {
    moment.warp = moment.rank = kSeveral;
  } else if (is_same_block_moment && moment.warp_barriers == now.warp_barriers && moment.rank != now.rank) {
    moment.rank = kSeveral;
  } else {
    reads = {now, place};
  }
}

std::string RaceCheck::look(size_t offset, size_t num_bytes, Access access, const Moment& now, const Place& place) {
  const size_t end = (offset + num_bytes - 1) / kGranuleBytes;
  for (size_t i = offset / kGranuleBytes; i <= end; ++i) {
    Cell& cell = cells_[i];
    if (cell.is_underway) return "the copy that began at " + text(cell.write.place) + " is not waited for";
    if (cell.write.has_happened() && !cell.write.is_ordered_before(now))
      return "a race with thread " + std::to_string(cell.write.moment.rank) + ", which wrote at " +
             text(cell.write.place);
    if (access == Access::kRead) {
      note_read(cell.read, now, place);
    } else if (cell.read.has_happened() && !cell.read.is_ordered_before(now)) {
      return "a race with what was read at " + text(cell.read.place);
    } else {
      cell.write = {now, place};
      cell.is_underway = access == Access::kAsyncWrite;
    }
  }
  return {};
}

void RaceCheck::arrive(size_t offset, size_t num_bytes, const Moment& now) {
  for (size_t i = offset / kGranuleBytes; i < (offset + num_bytes) / kGranuleBytes; ++i) {
    cells_[i].write.moment = now;
    cells_[i].is_underway = false;
  }
}

}  // namespace simt
