// Products of activations and a packed matrix with 4- or 8-bit codes: interface of every instruction set.
//
// weight[row][column] = (code - zero) * scale, zero and scale are those of the column's group. Activations are rounded to
// 8 bits, in chunks with one scale; a chunk is within one group. The products are therefore sums of integers:
//   output = sum over chunks of  activation_scale * weight_scale * (sum of code * activation - zero * sum of activation)
//
// Codes are stored in panels of 16 output features. One step of a panel is 64 bytes, four for each output:
//   8 bits  [panels][padded / 4][16][4]   columns 4 s to 4 s + 3
//   4 bits  [panels][padded / 8][16][4]   columns 8 s to 8 s + 3 in the low halves, 8 s + 4 to 8 s + 7 in the high ones
// `padded` is the number of columns rounded up to a multiple of 8. Scales and zeros are [panels][groups][16].
#pragma once

#include <cstdint>

#include "isa.hpp"

namespace radixrt {

inline constexpr int64_t kLongestChunk = 128;  // columns

struct Groupwise {
  const uint8_t* codes;
  const char* scales;    // float16
  const uint8_t* zeros;
  int64_t rows, columns;
  int64_t group_size;    // columns of a group; the last one may be shorter
  int64_t chunk;         // columns of a chunk, a multiple of 8; it divides group_size, or there is one group
  const void* bias;      // [rows] of the output's dtype, or null
  const char* inputs;    // [tokens] prepared by `prepare`
  int64_t input_bytes;   // from one token to the next
  char* output;          // [tokens, rows]
  int64_t output_bytes;  // from one token to the next

  int64_t steps() const { return (columns + 7) / 8; }  // of 8 columns
  int64_t chunks() const { return (columns + chunk - 1) / chunk; }
  int64_t groups() const { return (columns + group_size - 1) / group_size; }
};

struct GroupwiseKernels {
  struct Of {  // a dtype of hidden states
    // Rounds the activations of a token.
    void (*prepare)(const void* hidden, int64_t columns, int64_t chunk, void* prepared);
    // Outputs of `panels` panels from `first_panel` on, for `tokens` tokens (at most kUnitTokens) from `first_token` on.
    void (*multiply_8)(const Groupwise& matrix, int64_t first_panel, int panels, int64_t first_token, int tokens);
    void (*multiply_4)(const Groupwise& matrix, int64_t first_panel, int panels, int64_t first_token, int tokens);
    // output[i] = weight[row][i]
    void (*look_up_8)(const Groupwise& matrix, int64_t row, void* output);
    void (*look_up_4)(const Groupwise& matrix, int64_t row, void* output);
  };
  int64_t (*prepared_bytes)(int64_t columns, int64_t chunk);  // of a token, a multiple of 64
  Of float32, bfloat16, float16;
};

}  // namespace radixrt
