// Rotary position embedding of the heads of one token: interface of every instruction set.
#pragma once

#include <cstdint>

namespace radixrt {

struct RotaryKernels {
  // Rotates features i and i + half of each head by the i-th angle, in place. cos_sin: `half` cosines, then `half` sines.
  using Heads = void (*)(void* heads, int64_t num_heads, int64_t head_stride, int64_t half, const float* cos_sin);
  Heads float32, bfloat16, float16;
  // Rotates features 2 i and 2 i + 1.
  Heads float32_neighbours, bfloat16_neighbours, float16_neighbours;
};

}  // namespace radixrt
