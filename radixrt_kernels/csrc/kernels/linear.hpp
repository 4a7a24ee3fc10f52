// Products of activations and a packed weight matrix: interface of every instruction set.
//
// A packed matrix has panels of 16 output features; the last panel is padded with zeros. In a panel the input
// features are consecutive, so computing 16 outputs reads memory sequentially:
//   bfloat16          [panels][ceil(columns / 2)][16][2]
//   float16, float32  [panels][columns][16]
#pragma once

#include <cstdint>

namespace radixrt {

inline constexpr int kPanel = 16;         // output features in a panel
inline constexpr int kUnitPanels = 4;     // panels that are computed together
inline constexpr int kUnitTokens = 256;   // maximum tokens in one call of `multiply`
inline constexpr int kFewTokens = 16;     // up to this number, memory is the limit

// A product; one call computes a part of it.
struct Linear {
  const char* weights;
  int64_t rows, columns;
  const void* bias;     // [rows] of the weights' dtype, or null
  const char* hidden;   // [tokens, columns], or the result of `prepare`
  int64_t hidden_bytes; // from one token to the next
  char* output;         // [tokens, rows] of the weights' dtype, or float32
  int64_t output_bytes; // from one token to the next
  bool rounds = true;   // to the weights' dtype; else outputs are float32
  bool adds = false;    // to what the output holds, before it is rounded
  const int32_t* places = nullptr;  // the output row of each token; null: its own index
};

struct LinearKernels {
  struct Of {
    // Bytes of a token's prepared inputs; 0 if the inputs are used directly.
    int64_t (*prepared_bytes)(int64_t columns);
    void (*prepare)(const void* hidden, int64_t columns, void* prepared);
    // Outputs of `panels` panels from `first_panel` on, for `tokens` tokens from `first_token` on.
    void (*multiply)(const Linear& linear, int64_t first_panel, int panels, int64_t first_token, int tokens);
    // output[i] = weight[row][i]
    void (*look_up)(const char* weights, int64_t columns, int64_t row, void* output);
  };
  Of float32, bfloat16, float16;
  Of bfloat16_by_float;  // inputs are float32, and a panel of weights is [columns][16] as in the other two
};

}  // namespace radixrt
