// Choosing the next token of one row of logits, as every instruction set offers it.
#pragma once

#include <cstdint>

namespace radixrt {

struct SampledRow {
  const float* logits;
  int64_t vocab;
  const uint32_t* allowed;  // a bit for each token, or null: all are
  bool greedy;
  float temperature;
  int64_t top_k;            // vocab: no limit
  float top_p;              // above 1: no limit
  float log_min_p;          // minus infinity: no limit
  uint64_t noise_key;       // of seed and position
};

struct SamplerKernels {
  // Floats of scratch memory that `sample` wants, at a multiple of 64 bytes.
  int64_t (*scratch_floats)(int64_t vocab);
  // The token; `*peak` is the largest logit, NaN where one is not finite.
  int64_t (*sample)(const SampledRow& row, float* scratch, float* peak);
};

}  // namespace radixrt
