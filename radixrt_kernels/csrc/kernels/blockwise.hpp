// Products of activations and a packed matrix of GGUF blocks: interface of every instruction set.
//
// block_forms.hpp describes the packed form. Activations are rounded to 8 bits, with one scale per 32 columns. The products of a scale's
// columns are summed as integers, and scaled and added up in float32:
//   output = sum over blocks of  activation_scale * (scale * (sum of code * activation) - minimum * sum of activation)
#pragma once

#include <cstdint>

#include "block_forms.hpp"
#include "isa.hpp"

namespace radixrt {

struct Blockwise {
  const BlockForm* form;
  const uint8_t* panels;
  int64_t panel_bytes;
  int64_t rows, columns;
  const void* bias;      // [rows] of the output's dtype, or null
  const char* inputs;    // [tokens] prepared by `prepare`
  int64_t input_bytes;   // from one token to the next
  char* output;          // [tokens, rows]
  int64_t output_bytes;  // from one token to the next

  int64_t blocks() const { return columns / kBlock; }
};

struct BlockwiseKernels {
  struct Of {  // a dtype of hidden states
    // Rounds the activations of a token.
    void (*prepare)(const void* hidden, int64_t columns, void* prepared);
    // Outputs of `panels` panels from `first_panel` on, for `tokens` tokens (at most kUnitTokens) from `first_token` on.
    void (*multiply)(const Blockwise& matrix, int64_t first_panel, int panels, int64_t first_token, int tokens);
    // output[i] = weight[row][i]
    void (*look_up)(const Blockwise& matrix, int64_t row, void* output);
  };
  int64_t (*prepared_bytes)(int64_t columns);  // of a token, a multiple of 64
  Of float32, bfloat16, float16;
};

}  // namespace radixrt
