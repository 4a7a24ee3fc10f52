// AMX operations on tiles, and an emulation in plain C++ for processors without AMX.
//
// A tile register has up to 16 rows of up to 64 bytes. The tile configuration is thread state. A product configures its tiles first
// and releases them afterwards. It does not rely on a configuration left by other libraries.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2: LDTILECFG, TILELOADD, TILESTORED, TDPBF16PS and
// TDPBSUD. The emulation follows their "Operation" sections, and traps where the processor would.
#pragma once

#if defined(RADIXRT_EMULATED_AMX) || (defined(__AMX_BF16__) && defined(__AMX_INT8__))
#define RADIXRT_HAS_AMX

#include "simd.hpp"

namespace radixrt::RADIXRT_ISA::amx {

inline constexpr int kRows = 16, kRowBytes = 64;

// The shapes of tiles 0 to 7 as LDTILECFG reads them; a tile with 0 rows and 0 bytes is unused.
struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int rows_of, int row_bytes_of) {
    rows[tile] = static_cast<uint8_t>(rows_of);
    row_bytes[tile] = static_cast<uint16_t>(row_bytes_of);
  }
};
static_assert(sizeof(Shapes) == 64);

#if !defined(RADIXRT_EMULATED_AMX)

// Assembler instead of intrinsics: GCC's intrinsics take only a literal digit for a tile, and are not declared to read and write
// memory, so the compiler may move a store behind them.

RADIXRT_INLINE void configure(const Shapes& shapes) { __asm__ volatile("ldtilecfg %0" : : "m"(shapes) : "memory"); }
RADIXRT_INLINE void release() { __asm__ volatile("tilerelease" : : : "memory"); }

template <int kTile>
RADIXRT_INLINE void zero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

template <int kTile>
RADIXRT_INLINE void load(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
RADIXRT_INLINE void store(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
}

template <int kSums, int kLeft, int kRight>
RADIXRT_INLINE void add_products_of_bfloat16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kLeft), "i"(kRight));
}

template <int kSums, int kLeft, int kRight>
RADIXRT_INLINE void add_products_of_bytes() {
  __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kLeft), "i"(kRight));
}

#else

struct State {
  bool configured;
  Shapes shapes;
  uint8_t data[8][kRows][kRowBytes];
};
inline thread_local State state{};

inline void require(bool condition) {
  if (!condition) __builtin_trap();
}

inline void configure(const Shapes& shapes) {
  const uint8_t none[14] = {};
  require(shapes.palette == 1 && shapes.start_row == 0 && memcmp(shapes.reserved, none, sizeof none) == 0);
  for (int tile = 0; tile < 16; ++tile) {
    require(shapes.rows[tile] <= (tile < 8 ? kRows : 0) && shapes.row_bytes[tile] <= (tile < 8 ? kRowBytes : 0));
    require((shapes.rows[tile] == 0) == (shapes.row_bytes[tile] == 0));
  }
  memset(state.data, 0, sizeof state.data);
  state.shapes = shapes;
  state.configured = true;
}

inline void release() { state = State{}; }

inline void require_tile(int tile) { require(state.configured && state.shapes.rows[tile] > 0); }

template <int kTile>
void zero() {
  require_tile(kTile);
  memset(state.data[kTile], 0, sizeof state.data[kTile]);
}

template <int kTile>
void load(const void* from, int64_t stride) {
  zero<kTile>();
  for (int row = 0; row < state.shapes.rows[kTile]; ++row)
    memcpy(state.data[kTile][row], static_cast<const char*>(from) + row * stride, state.shapes.row_bytes[kTile]);
}

template <int kTile>
void store(void* to, int64_t stride) {
  require_tile(kTile);
  for (int row = 0; row < state.shapes.rows[kTile]; ++row)
    memcpy(static_cast<char*>(to) + row * stride, state.data[kTile][row], state.shapes.row_bytes[kTile]);
}

inline void require_product(int sums, int left, int right) {
  require_tile(sums), require_tile(left), require_tile(right);
  require(sums != left && left != right && sums != right);
  const Shapes& s = state.shapes;
  require(s.row_bytes[left] % 4 == 0 && s.row_bytes[right] % 4 == 0);
  require(s.rows[sums] == s.rows[left] && s.row_bytes[sums] == s.row_bytes[right] && s.row_bytes[left] / 4 == s.rows[right]);
}

// Subnormal numbers are flushed to zero, before a product and after each addition.
inline float flushed(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0, x) : x; }

inline float widened(const uint8_t* bfloat16) {
  uint32_t bits = static_cast<uint32_t>(bfloat16[0] | bfloat16[1] << 8) << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return flushed(x);
}

template <int kSums, int kLeft, int kRight>
void add_products_of_bfloat16() {
  require_product(kSums, kLeft, kRight);
  for (int row = 0; row < state.shapes.rows[kSums]; ++row) {
    for (int i = 0; i < state.shapes.row_bytes[kSums]; i += 4) {
      float of_parity[2] = {}, sum;  // even and odd products have separate sums
      for (int k = 0; k < state.shapes.rows[kRight]; ++k)
        for (int odd = 0; odd < 2; ++odd) {
          float left = widened(&state.data[kLeft][row][4 * k + 2 * odd]), right = widened(&state.data[kRight][k][i + 2 * odd]);
          of_parity[odd] = flushed(__builtin_fmaf(left, right, of_parity[odd]));
        }
      memcpy(&sum, &state.data[kSums][row][i], sizeof sum);
      sum = flushed(flushed(sum) + flushed(of_parity[0] + of_parity[1]));
      memcpy(&state.data[kSums][row][i], &sum, sizeof sum);
    }
  }
}

template <int kSums, int kLeft, int kRight>
void add_products_of_bytes() {
  require_product(kSums, kLeft, kRight);
  for (int row = 0; row < state.shapes.rows[kSums]; ++row) {
    for (int i = 0; i < state.shapes.row_bytes[kSums]; i += 4) {
      uint32_t sum;  // wraps around
      memcpy(&sum, &state.data[kSums][row][i], sizeof sum);
      for (int k = 0; k < state.shapes.rows[kRight]; ++k)
        for (int byte = 0; byte < 4; ++byte)
          sum += static_cast<uint32_t>(static_cast<int8_t>(state.data[kLeft][row][4 * k + byte]) * state.data[kRight][k][i + byte]);
      memcpy(&state.data[kSums][row][i], &sum, sizeof sum);
    }
  }
}

#endif

}  // namespace radixrt::RADIXRT_ISA::amx

#endif
