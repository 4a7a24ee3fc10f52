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

}  // namespace
}  // namespace RADIXRT_ISA

template <>
const RotaryKernels& table_of<RotaryKernels, Isa::RADIXRT_ISA>() {
  using namespace RADIXRT_ISA;
  static constexpr RotaryKernels table{rotate<float>, rotate<BFloat16>, rotate<Float16>};
  return table;
}

}  // namespace radixrt
