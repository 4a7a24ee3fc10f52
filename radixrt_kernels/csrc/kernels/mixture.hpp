// What a mixture of experts does beside its products, for one token, as every instruction set offers it.
#pragma once

#include <cstdint>

namespace radixrt {

struct MixtureKernels {
  struct Of {  // a dtype of logits and hidden states
    // The `top_k` experts of the largest of `count` logits, largest first, of equal ones the first. Their weights are the softmax
    // over all logits, or over the chosen ones alone.
    void (*choose)(const void* logits, int64_t count, int64_t top_k, bool among_chosen, float* weights, int64_t* experts);
    // output[i] = sum over j < count of weights[j] * values[places[j]][i], in float32, rounded once; rows are `row_bytes` apart.
    void (*weighted_sum)(
        const char* values, int64_t row_bytes, const int32_t* places, const float* weights, int64_t count, int64_t size, void* output);
  };
  Of float32, bfloat16, float16;
};

}  // namespace radixrt
