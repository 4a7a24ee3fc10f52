// RMSNorm of one row: interface of every instruction set.
#pragma once

#include <cstdint>

namespace radixrt {

struct NormKernels {
  // output = norm(hidden) * weight. With a residual, the residual is first set to hidden + residual, rounded, and then normalized.
  // output may be hidden. `unit_offset`: the factor is 1 + weight, and the normalized values are not rounded before it.
  using Row = void (*)(const void* hidden, void* residual, const void* weight, void* output, int64_t size, float eps,
                       bool unit_offset);
  Row float32, bfloat16, float16;
};

}  // namespace radixrt
