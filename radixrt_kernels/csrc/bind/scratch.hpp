// Memory of the calling thread in which a kernel's inputs are prepared; it is kept from one call to the next.
#pragma once

#include <cstdint>
#include <vector>

namespace radixrt {

// At least `bytes` bytes, at a multiple of 64, until the next call in the same thread.
inline char* scratch(int64_t bytes) {
  static thread_local std::vector<char> memory;
  if (static_cast<int64_t>(memory.size()) < bytes + 64) memory.resize(bytes + 64);
  return memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & 63);
}

}  // namespace radixrt
