// RMSNorm of one row, optionally after the residual addition; compiled once for each instruction set.
#include "kernels/norm.hpp"

#include "isa.hpp"
#include "simd.hpp"

namespace radixrt {
namespace RADIXRT_ISA {
namespace {

RADIXRT_INLINE Floats rounded(Floats x, const float*) { return x; }
RADIXRT_INLINE Floats rounded(Floats x, const BFloat16*) {
  return (Floats)(__builtin_convertvector(to_bfloat16(x), UInts) << 16);
}
RADIXRT_INLINE Floats rounded(Floats x, const Float16*) { return from_float16(to_float16(x)); }

// Calls `body(i, load, store)` for each vector of a row; the last one may be partial.
template <class T, class Body>
RADIXRT_INLINE void for_each_vector(int64_t size, Body body) {
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth)
    body(i, [](const T* from) { return load(from); }, [](T* to, Floats x) { store(to, x); });
  if (int rest = static_cast<int>(size - i))
    body(i, [=](const T* from) { return load_first(from, rest); }, [=](T* to, Floats x) { store_first(to, x, rest); });
}

template <class T>
void row(const void* hidden_row, void* residual_row, const void* weight_row, void* output_row, int64_t size, float eps,
         bool unit_offset) {
  auto hidden = static_cast<const T*>(hidden_row);
  auto residual = static_cast<T*>(residual_row);
  auto weight = static_cast<const T*>(weight_row);
  auto output = static_cast<T*>(output_row);
  Floats squares = splat(0.0f);
  if (residual) {
    for_each_vector<T>(size, [&](int64_t i, auto get, auto put) {
      Floats x = rounded(get(residual + i) + get(hidden + i), hidden);
      put(residual + i, x);
      squares = squares + x * x;
    });
    hidden = residual;
  } else {
    for_each_vector<T>(size, [&](int64_t i, auto get, auto) {
      Floats x = get(hidden + i);
      squares = squares + x * x;
    });
  }
  const float factor = 1.0f / __builtin_sqrtf(sum(squares) / size + eps);
  for_each_vector<T>(size, [&](int64_t i, auto get, auto put) {
    Floats x = get(hidden + i) * factor, w = get(weight + i);
    put(output + i, unit_offset ? x * (1.0f + w) : rounded(x, hidden) * w);
  });
}

}  // namespace
}  // namespace RADIXRT_ISA

template <>
const NormKernels& table_of<NormKernels, Isa::RADIXRT_ISA>() {
  using namespace RADIXRT_ISA;
  static constexpr NormKernels table{row<float>, row<BFloat16>, row<Float16>};
  return table;
}

}  // namespace radixrt
