// Which instruction sets are the kernels compiled for, which does this processor have, and which is in use?
#pragma once

#include <string>
#include <vector>

#include "isa_list.hpp"  // made by CMake: RADIXRT_FOR_EACH_ISA(X), in ascending order

namespace radixrt {

#define RADIXRT_ENUMERATOR(isa) isa,
enum class Isa { RADIXRT_FOR_EACH_ISA(RADIXRT_ENUMERATOR) };
#undef RADIXRT_ENUMERATOR

extern Isa isa_in_use;

const char* name_of(Isa isa);

// Those that are compiled in and that this processor and its operating system support, in ascending order.
std::vector<Isa> usable_isas();

// Raises std::invalid_argument, which names the usable ones.
void use_isa(const std::string& name);

// The kernels of one family for one instruction set: a struct of function pointers, `Table`, of which
// kernels/FAMILY.cpp defines `table_of<Table, Isa::RADIXRT_ISA>()` each time it is compiled.
template <class Table, Isa isa>
const Table& table_of();

// The kernels of one family for the instruction set in use.
template <class Table>
const Table& kernels() {
#define RADIXRT_CASE(isa) \
  case Isa::isa:          \
    return table_of<Table, Isa::isa>();
  switch (isa_in_use) { RADIXRT_FOR_EACH_ISA(RADIXRT_CASE) }
#undef RADIXRT_CASE
  __builtin_unreachable();
}

}  // namespace radixrt
