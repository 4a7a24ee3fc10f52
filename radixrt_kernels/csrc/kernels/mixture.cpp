// Selects the experts of a token, and sums their outputs; compiled once for each instruction set.
#include "kernels/mixture.hpp"

#include "isa.hpp"
#include "simd.hpp"

namespace radixrt {
namespace RADIXRT_ISA {
namespace {

// Insertion into a descending list. NaN is inserted at the end, so that always top_k different experts are selected.
template <class T>
RADIXRT_INLINE void find_largest(const T* logits, int64_t count, int64_t top_k, float* values, int64_t* experts) {
  int64_t found = 0;
  for (int64_t first = 0; first < count; first += kWidth) {
    int here = static_cast<int>(count - first < kWidth ? count - first : kWidth);
    Floats some = here == kWidth ? load(logits + first) : load_first(logits + first, here);
    for (int lane = 0; lane < here; ++lane) {
      float value = some[lane];
      if (found == top_k && value <= values[top_k - 1]) continue;
      int64_t at = found < top_k ? found++ : top_k - 1;
      for (; at > 0 && values[at - 1] < value; --at) {
        values[at] = values[at - 1];
        experts[at] = experts[at - 1];
      }
      values[at] = value;
      experts[at] = first + lane;
    }
  }
}

// The sum of e^(logit - largest).
template <class T>
RADIXRT_INLINE float sum_of_exponentials(const T* logits, int64_t count, float largest) {
  Floats total = splat(0);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) total += exp(load(logits + i) - largest);
  float rest = 0;
  if (i < count) {
    Floats last = exp(load_first(logits + i, static_cast<int>(count - i)) - largest);
    for (int lane = 0; lane < count - i; ++lane) rest += last[lane];
  }
  return sum(total) + rest;
}

template <class T>
void choose(const void* from, int64_t count, int64_t top_k, bool among_chosen, float* weights, int64_t* experts) {
  auto logits = static_cast<const T*>(from);
  find_largest(logits, count, top_k, weights, experts);
  float largest = weights[0];
  float total = among_chosen ? sum_of_exponentials(weights, top_k, largest) : sum_of_exponentials(logits, count, largest);
  for (int64_t i = 0; i < top_k; ++i) weights[i] = exp(splat(weights[i] - largest))[0] / total;
}

template <class T>
void weighted_sum(
    const char* values, int64_t row_bytes, const int32_t* places, const float* weights, int64_t count, int64_t size, void* output) {
  auto to = static_cast<T*>(output);
  auto row = [&](int64_t j) { return reinterpret_cast<const T*>(values + places[j] * row_bytes); };
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) {
    Floats total = splat(0);
    for (int64_t j = 0; j < count; ++j) total += weights[j] * load(row(j) + i);
    store(to + i, total);
  }
  if (int rest = static_cast<int>(size - i)) {
    Floats total = splat(0);
    for (int64_t j = 0; j < count; ++j) total += weights[j] * load_first(row(j) + i, rest);
    store_first(to + i, total, rest);
  }
}

template <class T>
constexpr MixtureKernels::Of kernels_of() {
  return {choose<T>, weighted_sum<T>};
}

}  // namespace
}  // namespace RADIXRT_ISA

template <>
const MixtureKernels& table_of<MixtureKernels, Isa::RADIXRT_ISA>() {
  using namespace RADIXRT_ISA;
  static constexpr MixtureKernels table{kernels_of<float>(), kernels_of<BFloat16>(), kernels_of<Float16>()};
  return table;
}

}  // namespace radixrt
