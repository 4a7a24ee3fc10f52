// Blocks of GGUF's kinds IQ2 and IQ3, whose codes are indices of a grid: a table of the magnitudes of 8 or 4 columns together.
#pragma once

#include "block_forms.hpp"

namespace radixrt {

// Codes of part `part` of 8: of IQ2 kinds a magnitude from 0 to 2, plus 4 if the weight is negative; of IQ3_XXS from 0 to 7, plus 8; of
// IQ3_S from 0 to 15 in ascending order of the weights.
void codes_of_grid(BlockKind kind, const uint8_t* block, int part, BlockCodes& codes);

// The packed form of the scales of part `part`.
uint8_t scale_of_grid(BlockKind kind, const uint8_t* block, int part);

}  // namespace radixrt
