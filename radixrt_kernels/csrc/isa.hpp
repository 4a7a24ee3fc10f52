// Instruction sets: compiled, supported by this processor, and in use.
#pragma once

#include <string>
#include <vector>

// Made by CMake: RADIXRT_FOR_EACH_ISA(X), in ascending order of speed, and RADIXRT_FOR_EACH_SHARED(X), with the table, the instruction set that
// it is not compiled for, and the set below it.
#include "isa_list.hpp"

namespace radixrt {

#define RADIXRT_ENUMERATOR(isa) isa,
enum class Isa { RADIXRT_FOR_EACH_ISA(RADIXRT_ENUMERATOR) };
#undef RADIXRT_ENUMERATOR

extern Isa isa_in_use;

const char* name_of(Isa isa);

// The compiled instruction sets that the processor and the operating system support, in ascending order of speed.
std::vector<Isa> usable_isas();

// The usable instruction set with this name. Throws std::invalid_argument with the list of usable names.
Isa usable_isa(const std::string& name);

// The kernels of one family for one instruction set: a struct of function pointers, `Table`, of which
// kernels/FAMILY.cpp defines `table_of<Table, Isa::RADIXRT_ISA>()` each time it is compiled. A family that uses nothing of what a set adds
// to the one below it is not compiled for it, and has the table of the one below (shared_tables.cpp).
template <class Table, Isa isa>
const Table& table_of();

// The kernels of one family, by default for the instruction set in use.
template <class Table>
const Table& kernels(Isa isa = isa_in_use) {
#define RADIXRT_CASE(name) \
  case Isa::name:          \
    return table_of<Table, Isa::name>();
  switch (isa) { RADIXRT_FOR_EACH_ISA(RADIXRT_CASE) }
#undef RADIXRT_CASE
  __builtin_unreachable();
}

}  // namespace radixrt
