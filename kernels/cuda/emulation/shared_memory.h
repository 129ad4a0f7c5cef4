// The shared memory of one block: what the launch gave, and what the kernel declares.
#pragma once

#include <cstddef>
#include <vector>

namespace simt {

class SharedMemory {
 public:
  // On the OS thread that will run the block.
  explicit SharedMemory(size_t dynamic_bytes);

  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // A block finds NaN in it, as float32, bfloat16 and float16; -1 as an integer.
  void poison();

  // Where `bytes` at `address` lie in it, from 0 to size(); -1 if they are not all in it.
  ptrdiff_t offset(const void* address, size_t bytes) const;
  size_t size() const { return dynamic_bytes_ + static_bytes_; }
  unsigned char* dynamic() const { return dynamic_; }
  size_t dynamic_bytes() const { return dynamic_bytes_; }

 private:
  std::vector<unsigned char> storage_;
  unsigned char* dynamic_;
  size_t dynamic_bytes_;
  unsigned char* static_;
  size_t static_bytes_;
};

}  // namespace simt
