// Memory that is kept from one step to the next.
#pragma once

#include <cstddef>
#include <memory>

namespace pageturner {

// Memory that grows to what the largest step needs. What it held is lost when it grows.
template <class T>
class Buffer {
 public:
  T* of(std::size_t size) {
    if (size > capacity) {
      memory.reset(new T[size]);
      capacity = size;
    }
    return memory.get();
  }
  T* data() const { return memory.get(); }

 private:
  std::unique_ptr<T[]> memory;
  std::size_t capacity = 0;
};

}  // namespace pageturner
