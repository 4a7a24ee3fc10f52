// Rotary position embedding of the heads of one token; compiled once for each instruction set.
#include "kernels/rotary.hpp"

#include "isa.hpp"
#include "simd.hpp"

namespace radixrt {
namespace RADIXRT_ISA {
namespace {

template <class T>
void rotate(void* heads, int64_t num_heads, int64_t head_stride, int64_t half, const float* cos_sin) {
  auto first = static_cast<T*>(heads);
  for (int64_t head = 0; head < num_heads; ++head, first += head_stride) {
    T* second = first + half;
    int64_t i = 0;
    for (; i + kWidth <= half; i += kWidth) {
      Floats a = load(first + i), b = load(second + i), cos = load(cos_sin + i), sin = load(cos_sin + half + i);
      store(first + i, a * cos - b * sin);
      store(second + i, b * cos + a * sin);
    }
    if (int rest = static_cast<int>(half - i)) {
      Floats a = load_first(first + i, rest), b = load_first(second + i, rest);
      Floats cos = load_first(cos_sin + i, rest), sin = load_first(cos_sin + half + i, rest);
      store_first(first + i, a * cos - b * sin, rest);
      store_first(second + i, b * cos + a * sin, rest);
    }
  }
}

// Neighbours are sorted to halves, rotated, and put back: so both ways round alike.
template <class T>
void rotate_neighbours(void* heads, int64_t num_heads, int64_t head_stride, int64_t half, const float* cos_sin) {
  constexpr int64_t kMost = 512;
  auto head = static_cast<T*>(heads);
  for (int64_t i = 0; i < num_heads; ++i, head += head_stride) {
    T sorted[2 * kMost];
    float angles[2 * kMost];
    for (int64_t first = 0; first < half; first += kMost) {
      const int64_t count = half - first < kMost ? half - first : kMost;
      T* pairs = head + 2 * first;
      for (int64_t pair = 0; pair < count; ++pair) {
        sorted[pair] = pairs[2 * pair];
        sorted[count + pair] = pairs[2 * pair + 1];
      }
      memcpy(angles, cos_sin + first, count * sizeof(float));
      memcpy(angles + count, cos_sin + half + first, count * sizeof(float));
      rotate<T>(sorted, 1, 0, count, angles);
      for (int64_t pair = 0; pair < count; ++pair) {
        pairs[2 * pair] = sorted[pair];
        pairs[2 * pair + 1] = sorted[count + pair];
      }
    }
  }
}

}  // namespace
}  // namespace RADIXRT_ISA

template <>
const RotaryKernels& table_of<RotaryKernels, Isa::RADIXRT_ISA>() {
  using namespace RADIXRT_ISA;
  static constexpr RotaryKernels table{rotate<float>, rotate<BFloat16>, rotate<Float16>,
                                       rotate_neighbours<float>, rotate_neighbours<BFloat16>, rotate_neighbours<Float16>};
  return table;
}

}  // namespace radixrt
