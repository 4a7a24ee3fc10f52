// Scratch memory of the calling thread for prepared inputs, kept between calls.
#pragma once

#include <cstdint>
#include <vector>

namespace radixrt {

// Returns at least `bytes` bytes with an alignment of 64, valid until the next call in the same thread.
inline char* scratch(int64_t bytes) {
  static thread_local std::vector<char> memory;
  if (static_cast<int64_t>(memory.size()) < bytes + 64) memory.resize(bytes + 64);
  return memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & 63);
}

}  // namespace radixrt
