// Recurrences of one sequence in the order of its tokens: interface of every instruction set.
#pragma once

#include <cstdint>

namespace radixrt {

constexpr int kMaxTaps = 4;     // of a short convolution
constexpr int kMaxKeys = 256;   // features of a key

// The copies of a state to make while a sequence is computed: behind token `ends[i] - 1` to row `rows[i]`. Tokens count from the
// first one of the step.
struct Keeps {
  int64_t count;
  const int32_t* ends;
  const int32_t* rows;
};

// A causal convolution of each channel over the last `taps` inputs: some channels of one sequence. Pointers are at the first of the
// channels; strides are in elements.
struct Convolution {
  const void *inputs, *before, *after;  // of the step's first token; before and after: factors of inputs and outputs, or null
  void* outputs;
  int64_t input_stride, before_stride, after_stride, output_stride;  // from token to token
  const void *weight, *bias;                                         // [taps, channels]; bias may be null
  void* states;                                                      // row 0; rows are [taps - 1, channels], oldest input first
  int64_t all_channels, row, channels, first, end;                   // the sequence has the tokens first..end-1
  int taps;
  bool silu;
  Keeps keeps;
};

// A matrix S [keys, columns] of one head of one sequence, to which each token adds the outer product of a key and a vector, and which
// it multiplies by a query. Pointers are at the first of the columns; strides are in elements.
struct Scan {
  const void *query, *key, *value;  // of the step's first token
  void* outputs;
  int64_t query_stride, key_stride, value_stride, output_stride;  // from token to token
  const float *decay, *gain, *query_scale, *key_scale;            // of the step's first token
  int64_t head_stride, scale_stride;                              // of decay and gain, and of the scales; the latter may be null
  float skip;                                                     // outputs get skip * value
  float* states;                                                  // row 0 of this head; rows have row_stride elements
  int64_t row_stride, all_columns, row, columns, keys, first, end;
  bool corrects;  // the vector is gain * (value - decayed S^T key), the delta rule; else gain * value
  Keeps keeps;
};

struct RecurrenceKernels {
  using Convolve = void (*)(const Convolution&);
  using Advance = void (*)(const Scan&);
  // 1 / sqrt(sum of squares + eps)
  using InverseNorm = float (*)(const void* row, int64_t size, float eps);
  // `gated` is the row times silu(gate). Without a weight: output = gated. `gate_first`: output = norm(gated) * weight; else output =
  // norm(row) * weight * silu(gate).
  using GatedNorm = void (*)(const void* row, const void* gate, const void* weight, void* output, int64_t size, float eps,
                             bool gate_first);
  struct OfType {
    Convolve convolve;
    Advance advance;
    InverseNorm inverse_norm;
    GatedNorm gated_norm;
  };
  OfType float32, bfloat16, float16;
  int columns;  // of the matrix of a scan that are computed together
};

}  // namespace radixrt
