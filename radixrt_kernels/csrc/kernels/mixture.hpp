// Operations of a mixture of experts besides its products, for one token: interface of every instruction set.
#pragma once

#include <cstdint>

namespace radixrt {

struct MixtureKernels {
  struct Of {  // a dtype of logits and hidden states
    // The `top_k` experts of the largest of `count` logits, in descending order; of equal logits the lower expert first. Their
    // weights are the softmax over all logits, or over the selected ones.
    void (*choose)(const void* logits, int64_t count, int64_t top_k, bool among_chosen, float* weights, int64_t* experts);
    // output[i] = sum over j < count of weights[j] * values[places[j]][i], in float32, rounded once; rows are `row_bytes` apart.
    void (*weighted_sum)(
        const char* values, int64_t row_bytes, const int32_t* places, const float* weights, int64_t count, int64_t size, void* output);
  };
  Of float32, bfloat16, float16;
};

}  // namespace radixrt
