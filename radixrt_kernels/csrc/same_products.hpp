// Checks that two instruction sets compute the same products.
#pragma once

#include "isa.hpp"

namespace radixrt {

// Compares linear layers of bfloat16, 8 bits and 4 bits, bit for bit, over numbers whose products and sums are exact in every
// instruction set. Takes some hundred microseconds of one thread.
bool same_products(Isa one, Isa other);

}  // namespace radixrt
