// Sampling of the next token of one row of logits: interface of every instruction set.
#pragma once

#include <cstdint>

namespace radixrt {

struct SampledRow {
  const float* logits;
  int64_t vocab;
  const uint32_t* allowed;  // one bit per allowed token, or null: all tokens
  bool greedy;
  float temperature;
  int64_t top_k;            // vocab: no limit
  float top_p;              // above 1: no limit
  float log_min_p;          // minus infinity: no limit
  uint64_t noise_key;       // of seed and position
};

struct SamplerKernels {
  // Number of floats of scratch memory for `sample`, aligned to 64 bytes.
  int64_t (*scratch_floats)(int64_t vocab);
  // Returns the token. `*peak` is the largest logit, NaN if a logit is not finite.
  int64_t (*sample)(const SampledRow& row, float* scratch, float* peak);
  // The logarithm of the sum of e^logit.
  float (*log_sum_exp)(const float* logits, int64_t count);
  // The logarithm of the share of the allowed tokens in that sum; minus infinity if no token is allowed.
  float (*log_kept_mass)(const float* logits, const uint32_t* allowed, int64_t count);
};

}  // namespace radixrt
