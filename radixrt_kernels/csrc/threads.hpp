// Divides a kernel's work among threads.
#pragma once

#include <cstdint>
#include <type_traits>

namespace radixrt {

// Number of computing threads, including the calling one. Default: the number of cores that the process may use.
int num_threads();
void set_num_threads(int threads);

namespace detail {
using Work = void (*)(void* context, int64_t index, int thread);
void run_in_parallel(int64_t count, Work work, void* context);
}  // namespace detail

// Calls `body(index, thread)` once for each index in 0..count-1, in any order, and returns when all are done. `thread` is in
// 0..num_threads()-1 and selects the thread's scratch memory. Indices are distributed one by one. Put the longest ones
// first; each should take at least a microsecond.
//
// Threads spin for some microseconds and then sleep. A call during another call (from another
// Python thread) is computed by its caller alone. `body` must not throw and must not call `parallel_for`.
template <class Body>
void parallel_for(int64_t count, Body&& body) {
  if (count == 1 || num_threads() == 1) {
    for (int64_t index = 0; index < count; ++index) body(index, 0);
    return;
  }
  detail::run_in_parallel(
      count, [](void* context, int64_t index, int thread) { (*static_cast<std::remove_reference_t<Body>*>(context))(index, thread); },
      &body);
}

// Same as `parallel_for` over ranges of 0..count-1, with `body(begin, end)`. Each range has at least `grain` indices.
template <class Body>
void parallel_ranges(int64_t count, int64_t grain, Body&& body) {
  int64_t most = (count + grain - 1) / grain;
  int64_t pieces = num_threads() < most ? num_threads() : most;
  if (pieces <= 1) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
  parallel_for(pieces, [&](int64_t piece, int) { body(count * piece / pieces, count * (piece + 1) / pieces); });
}

}  // namespace radixrt
