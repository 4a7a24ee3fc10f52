// Products of activations and a packed weight matrix, as every instruction set offers them.
//
// A packed matrix is a row of panels of 16 output features; the last one is filled up with zeros. In a panel the input
// features follow each other, so that computing 16 outputs reads memory from front to back:
//   bfloat16          [panels][ceil(columns / 2)][16][2]
//   float16, float32  [panels][columns][16]
#pragma once

#include <cstdint>

namespace radixrt {

inline constexpr int kPanel = 16;         // output features in a panel
inline constexpr int kUnitPanels = 4;     // panels that are computed together
inline constexpr int kUnitTokens = 256;   // tokens that one call of `multiply` computes at most
inline constexpr int kFewTokens = 16;     // up to which the weights' way from memory takes longer than the arithmetic

// A product, of which one call computes a part.
struct Linear {
  const char* weights;
  int64_t rows, columns;
  const void* bias;     // [rows] of the weights' dtype, or null
  const char* hidden;   // [tokens, columns], or what `prepare` made of it
  int64_t hidden_bytes; // from one token to the next
  char* output;         // [tokens, rows] of the weights' dtype
  int64_t output_bytes; // from one token to the next
};

struct LinearKernels {
  struct Of {
    // Bytes of a token's prepared inputs; 0 if they are used as they are.
    int64_t (*prepared_bytes)(int64_t columns);
    void (*prepare)(const void* hidden, int64_t columns, void* prepared);
    // Outputs of `panels` panels from `first_panel` on, for `tokens` tokens from `first_token` on.
    void (*multiply)(const Linear& linear, int64_t first_panel, int panels, int64_t first_token, int tokens);
    // output[i] = weight[row][i]
    void (*look_up)(const char* weights, int64_t columns, int64_t row, void* output);
  };
  Of float32, bfloat16, float16;
};

}  // namespace radixrt
