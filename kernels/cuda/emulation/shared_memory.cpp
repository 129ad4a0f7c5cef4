#include "shared_memory.h"

#include <link.h>

#include <cstdint>
#include <cstring>
#include <memory>

#include "machine.h"

namespace simt {

// Static shared memory is thread-local, so that each OS thread has that of its block. Beside it, nothing in this
// library is thread-local but `position`: all the rest of the library's thread-local storage is shared memory.
__thread const Position* position = nullptr;

namespace {

constexpr unsigned char kPoison = 0xff;
constexpr size_t kAlignment = 128;  // as DYNAMIC_SHARED asks for on the GPU

struct ThreadLocalStorage {
  unsigned char* begin = nullptr;
  size_t bytes = 0;
};

bool is_inside(const void* address, size_t bytes, const unsigned char* begin, size_t size) {
  const auto offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(begin);
  return offset < size && size - offset >= bytes;
}

// Of the loaded objects, this library is the one in whose storage `position` lies.
int find_own(dl_phdr_info* object, size_t, void* found) {
  auto* begin = static_cast<unsigned char*>(object->dlpi_tls_data);
  for (int i = 0; begin != nullptr && i < object->dlpi_phnum; ++i) {
    const auto& segment = object->dlpi_phdr[i];
    if (segment.p_type != PT_TLS || !is_inside(&position, sizeof position, begin, segment.p_memsz)) continue;
    *static_cast<ThreadLocalStorage*>(found) = {begin, segment.p_memsz};
    return 1;
  }
  return 0;
}

}  // namespace

SharedMemory::SharedMemory(size_t dynamic_bytes)
    : storage_(dynamic_bytes + kAlignment), dynamic_bytes_(dynamic_bytes) {
  void* aligned = storage_.data();
  size_t room = storage_.size();
  dynamic_ = static_cast<unsigned char*>(std::align(kAlignment, dynamic_bytes, aligned, room));
  position = nullptr;  // the storage comes into being when a thread touches it
  ThreadLocalStorage own;
  dl_iterate_phdr(find_own, &own);
  static_ = own.begin;
  static_bytes_ = own.bytes;
}

void SharedMemory::poison() {
  memset(dynamic_, kPoison, dynamic_bytes_);
  const Position* kept = position;
  memset(static_, kPoison, static_bytes_);
  position = kept;
}

ptrdiff_t SharedMemory::offset(const void* address, size_t bytes) const {
  const auto* at = static_cast<const unsigned char*>(address);
  if (is_inside(at, bytes, dynamic_, dynamic_bytes_)) return at - dynamic_;
  if (is_inside(at, bytes, static_, static_bytes_)) return ptrdiff_t(dynamic_bytes_) + (at - static_);
  return -1;
}

}  // namespace simt
