// Detects the features of the processor by cpuid, and the register states that the operating system saves by xgetbv.
#include "isa.hpp"

#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace radixrt {

namespace {

#if defined(__x86_64__)
struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

bool has_bits(unsigned value, std::initializer_list<int> bits) {
  for (int bit : bits)
    if (!(value >> bit & 1)) return false;
  return true;
}

// The register states that the operating system saves at a context switch (XCR0).
unsigned saved_states() {
  if (!has_bits(cpuid(1, 0).ecx, {27})) return 0;  // OSXSAVE
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// Linux grants the tile registers to a process on request.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool processor_has(const std::string& isa) {
  unsigned states = saved_states();
  Registers basic = cpuid(1, 0), extended = cpuid(7, 0), more = cpuid(7, 1);
  bool avx2 = has_bits(states, {1, 2}) && has_bits(basic.ecx, {12, 28, 29}) && has_bits(extended.ebx, {5});
  bool avx512 = avx2 && has_bits(states, {5, 6, 7}) && has_bits(extended.ebx, {16, 17, 30, 31});
  bool avx512_bf16 = avx512 && has_bits(more.eax, {5}) && has_bits(extended.ecx, {11});
  if (isa == "baseline") return true;
  if (isa == "avx2") return avx2;
  if (isa == "avx2_vnni") return avx2 && has_bits(more.eax, {4});
  if (isa == "avx2_vnni_evex") return avx512 && has_bits(extended.ecx, {11});
  if (isa == "avx512") return avx512;
  if (isa == "avx512_bf16" || isa == "amx_emulated") return avx512_bf16;
  if (isa == "amx")
    return avx512_bf16 && has_bits(extended.edx, {22, 24, 25}) && has_bits(states, {17, 18}) && may_use_tiles();
  return false;
}
#else
bool processor_has(const std::string& isa) { return isa == "baseline"; }
#endif

}  // namespace

const char* name_of(Isa isa) {
#define RADIXRT_CASE(name) \
  case Isa::name:          \
    return #name;
  switch (isa) { RADIXRT_FOR_EACH_ISA(RADIXRT_CASE) }
#undef RADIXRT_CASE
  __builtin_unreachable();
}

std::vector<Isa> usable_isas() {
  std::vector<Isa> usable;
#define RADIXRT_ADD(name) \
  if (processor_has(#name)) usable.push_back(Isa::name);
  RADIXRT_FOR_EACH_ISA(RADIXRT_ADD)
#undef RADIXRT_ADD
  return usable;
}

Isa isa_in_use = usable_isas().back();

Isa usable_isa(const std::string& name) {
  std::string names;
  for (Isa isa : usable_isas()) {
    if (name == name_of(isa)) return isa;
    names += std::string(names.empty() ? "" : ", ") + name_of(isa);
  }
  throw std::invalid_argument("instruction set '" + name + "' is not one that this build and this processor have: " + names);
}

}  // namespace radixrt
