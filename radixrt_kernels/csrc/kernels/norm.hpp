// RMSNorm of one row, as every instruction set offers it.
#pragma once

#include <cstdint>

namespace radixrt {

struct NormKernels {
  // output = norm(hidden) * weight. With a residual, it first becomes hidden + residual, rounded, and that is what is normed;
  // output may be hidden. `unit_offset`: the weight is 1 more than what is stored, and nothing is rounded before it.
  using Row = void (*)(const void* hidden, void* residual, const void* weight, void* output, int64_t size, float eps,
                       bool unit_offset);
  Row float32, bfloat16, float16;
};

}  // namespace radixrt
