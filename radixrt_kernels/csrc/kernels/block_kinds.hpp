// How the codes and scales of each of GGUF's kinds of blocks are read.
//
// A kind defines the number of scales per 32 columns (kGroups), the largest code (kLargest), the code of the weight 0 (kZero), and how
// codes and scales are read:
//   codes(lines, step): `lines` are those of 32 columns, `step` is from 0 to 7
//   scale(scales, block, group, lane): the scales of rows `lane` to `lane` + kWidth - 1 of a panel for 32 columns of a record
//   minimum(scales, block, group, lane): the same, only if kHasMinimum
#pragma once

#include "block_forms.hpp"
#include "kernels/byte_products.hpp"

namespace radixrt::RADIXRT_ISA {

RADIXRT_INLINE Floats halves_at(const uint8_t* from) { return load(reinterpret_cast<const Float16*>(from)); }

// Entries of a table by the bytes of `codes`, which are below 16.
RADIXRT_INLINE UInts entries(const uint8_t (&table)[16], UInts codes) {
#if defined(__AVX512BW__)
  return (UInts)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)), (__m512i)codes);
#elif defined(__AVX2__)
  return (UInts)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table)), (__m256i)codes);
#elif defined(__aarch64__)
  return (UInts)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes);
#else
  uint8_t bytes[sizeof codes];
  memcpy(bytes, &codes, sizeof bytes);
  for (uint8_t& byte : bytes) byte = table[byte];
  memcpy(&codes, bytes, sizeof bytes);
  return codes;
#endif
}

template <int kBits>
struct Codes {
  static constexpr int kLines = kBits, kLargest = (1 << kBits) - 1;

  static RADIXRT_INLINE UInts codes(const uint8_t* lines, int step) {
    if constexpr (kBits == 8) return codes_at(lines + step * kStepBytes);
    UInts pair = codes_at(lines + step / 2 * kStepBytes), low = (step % 2 ? pair >> 4 : pair) & 0x0f0f0f0fu;
    if constexpr (kBits == 5) {
      UInts upper = codes_at(lines + 4 * kStepBytes);
      return low | ((step < 4 ? upper << (4 - step) : upper >> (step - 4)) & 0x10101010u);
    }
    if constexpr (kBits == 6) {
      UInts upper = codes_at(lines + (4 + step / 4) * kStepBytes);
      int at = step % 4 * 2;
      return low | ((at < 4 ? upper << (4 - at) : upper >> (at - 4)) & 0x30303030u);
    }
    return low;
  }
};

template <int kBits, int kZero_>
struct Small : Codes<kBits> {  // Q4_0, Q5_0, Q8_0
  static constexpr int kGroups = 1, kZero = kZero_;
  static constexpr bool kHasMinimum = false;

  static RADIXRT_INLINE Floats scale(const uint8_t* scales, int block, int, int lane) {
    return halves_at(scales + block * 32 + 2 * lane);
  }
};

template <int kBits>
struct SmallWithMinimum : Codes<kBits> {  // Q4_1, Q5_1
  static constexpr int kGroups = 1, kZero = 0;
  static constexpr bool kHasMinimum = true;

  static RADIXRT_INLINE Floats scale(const uint8_t* scales, int block, int, int lane) {
    return halves_at(scales + block * 64 + 2 * lane);
  }
  static RADIXRT_INLINE Floats minimum(const uint8_t* scales, int block, int, int lane) {
    return -halves_at(scales + block * 64 + 32 + 2 * lane);
  }
};

template <int kBits>
struct WithMinimum : Codes<kBits> {  // Q4_K, Q5_K
  static constexpr int kGroups = 1, kZero = 0;
  static constexpr bool kHasMinimum = true;

  static RADIXRT_INLINE Floats scale(const uint8_t* scales, int block, int, int lane) {
    return halves_at(scales + 2 * lane) * bytes_at(scales + 64 + block * 32 + lane);
  }
  static RADIXRT_INLINE Floats minimum(const uint8_t* scales, int block, int, int lane) {
    return halves_at(scales + 32 + 2 * lane) * bytes_at(scales + 80 + block * 32 + lane);
  }
};

struct SixBits : Codes<6> {  // Q6_K
  static constexpr int kGroups = 2, kZero = 32;
  static constexpr bool kHasMinimum = false;

  static RADIXRT_INLINE Floats scale(const uint8_t* scales, int block, int group, int lane) {
    return halves_at(scales + 2 * lane) * bytes_at(reinterpret_cast<const int8_t*>(scales) + 32 + (2 * block + group) * 16 + lane);
  }
};

struct Floats4Bits : Codes<4> {  // MXFP4: codes are floats of 4 bits, of which the doubled values are integers
  static constexpr int kGroups = 1, kLargest = 24, kZero = 12;
  static constexpr bool kHasMinimum = false;
  alignas(16) static constexpr uint8_t kValues[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};  // plus 12

  static RADIXRT_INLINE UInts codes(const uint8_t* lines, int step) {
    return entries(kValues, Codes<4>::codes(lines, step));
  }
  static RADIXRT_INLINE Floats scale(const uint8_t* scales, int block, int, int lane) {
    auto exponent = (UInts)widened(scales + block * 16 + lane);  // of the scale plus 128, which halves the values again
    return (Floats)(exponent < 2 ? (UInts{} + 0x00200000u) << exponent : (exponent - 1) << 23);
  }
};

// ------------------------------------------------------------ codes of two and three bits, and of four bits for values of a table

RADIXRT_INLINE UInts four_bits_at(const uint8_t* lines, int step) {
  UInts pair = codes_at(lines + step / 2 * kStepBytes);
  return (step % 2 ? pair >> 4 : pair) & 0x0f0f0f0fu;
}

RADIXRT_INLINE UInts two_bits_at(const uint8_t* lines, int step) {
  return codes_at(lines + step / 4 * kStepBytes) >> (step % 4 * 2) & 0x03030303u;
}

RADIXRT_INLINE UInts three_bits_at(const uint8_t* lines, int step) {
  if (step < 6) return (codes_at(lines + step / 2 * kStepBytes) >> (step % 2 * 3)) & 0x07070707u;
  UInts lower = codes_at(lines + (step - 6) * kStepBytes), upper = codes_at(lines + 2 * kStepBytes);
  return (lower >> 6 & 0x03030303u) | (upper >> (step - 2) & 0x04040404u);
}

// Scales of a record: float16 d[16], then bytes.
RADIXRT_INLINE Floats signed_scale(const uint8_t* scales, int part, int lane) {
  return halves_at(scales + 2 * lane) * bytes_at(reinterpret_cast<const int8_t*>(scales) + 32 + part * 16 + lane);
}
RADIXRT_INLINE Floats unsigned_scale(const uint8_t* scales, int part, int lane) {
  return halves_at(scales + 2 * lane) * bytes_at(scales + 32 + part * 16 + lane);
}

struct Q2K {
  static constexpr int kLines = 2, kGroups = 2, kLargest = 3, kZero = 0;
  static constexpr bool kHasMinimum = true;

  static RADIXRT_INLINE UInts codes(const uint8_t* lines, int step) { return two_bits_at(lines, step); }
  static RADIXRT_INLINE Floats scale(const uint8_t* scales, int block, int group, int lane) {
    return halves_at(scales + 2 * lane) * __builtin_convertvector(parts_at(scales, block, group, lane) & 15, Floats);
  }
  static RADIXRT_INLINE Floats minimum(const uint8_t* scales, int block, int group, int lane) {
    return halves_at(scales + 32 + 2 * lane) * __builtin_convertvector(parts_at(scales, block, group, lane) >> 4, Floats);
  }

 private:
  static RADIXRT_INLINE Ints parts_at(const uint8_t* scales, int block, int group, int lane) {
    return widened(scales + 64 + (2 * block + group) * 16 + lane);
  }
};

struct Q3K {
  static constexpr int kLines = 3, kGroups = 2, kLargest = 7, kZero = 4;
  static constexpr bool kHasMinimum = false;

  static RADIXRT_INLINE UInts codes(const uint8_t* lines, int step) { return three_bits_at(lines, step); }
  static RADIXRT_INLINE Floats scale(const uint8_t* scales, int block, int group, int lane) {
    return signed_scale(scales, 2 * block + group, lane);
  }
};

struct UnevenValues {  // of IQ4_NL and IQ4_XS: from -127 to 113
  static constexpr int kLines = 4, kGroups = 1, kLargest = 240, kZero = 127;
  static constexpr bool kHasMinimum = false;
  alignas(16) static constexpr uint8_t kValues[16] = {0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240};  // plus 127

  static RADIXRT_INLINE UInts codes(const uint8_t* lines, int step) { return entries(kValues, four_bits_at(lines, step)); }
};

struct IQ4NL : UnevenValues {
  static RADIXRT_INLINE Floats scale(const uint8_t* scales, int block, int, int lane) {
    return halves_at(scales + block * 32 + 2 * lane);
  }
};

struct IQ4XS : UnevenValues {
  static RADIXRT_INLINE Floats scale(const uint8_t* scales, int block, int, int lane) { return signed_scale(scales, block, lane); }
};

struct IQ3XXS {  // half the magnitudes of the file: 2, 6, 10, 14, 18, 22, 26 and 31
  static constexpr int kLines = 4, kGroups = 1, kLargest = 62, kZero = 31;
  static constexpr bool kHasMinimum = false;
  alignas(16) static constexpr uint8_t kValues[16] = {33, 37, 41, 45, 49, 53, 57, 62, 29, 25, 21, 17, 13, 9, 5, 0};  // plus 31

  static RADIXRT_INLINE UInts codes(const uint8_t* lines, int step) { return entries(kValues, four_bits_at(lines, step)); }
  static RADIXRT_INLINE Floats scale(const uint8_t* scales, int block, int, int lane) {
    return unsigned_scale(scales, block, lane) * 0.5f;
  }
};

struct IQ3S {  // odd numbers from -15 to 15
  static constexpr int kLines = 4, kGroups = 1, kLargest = 30, kZero = 15;
  static constexpr bool kHasMinimum = false;

  static RADIXRT_INLINE UInts codes(const uint8_t* lines, int step) {
    UInts pair = codes_at(lines + step / 2 * kStepBytes);
    return (step % 2 ? pair >> 3 : pair << 1) & 0x1e1e1e1eu;
  }
  static RADIXRT_INLINE Floats scale(const uint8_t* scales, int block, int, int lane) { return unsigned_scale(scales, block, lane); }
};

struct GridOfThree {  // magnitudes of IQ2 kinds: 8, 25 and 43
  static constexpr int kLines = 3, kLargest = 86, kZero = 43;
  static constexpr bool kHasMinimum = false;
  alignas(16) static constexpr uint8_t kValues[16] = {51, 68, 86, 43, 35, 18, 0, 43};  // plus 43

  static RADIXRT_INLINE UInts codes(const uint8_t* lines, int step) { return entries(kValues, three_bits_at(lines, step)); }
};

struct IQ2XXS : GridOfThree {
  static constexpr int kGroups = 1;
  static RADIXRT_INLINE Floats scale(const uint8_t* scales, int block, int, int lane) {
    return unsigned_scale(scales, block, lane) * 0.125f;
  }
};

struct IQ2XS : GridOfThree {  // and IQ2_S
  static constexpr int kGroups = 2;
  static RADIXRT_INLINE Floats scale(const uint8_t* scales, int block, int group, int lane) {
    Ints both = widened(scales + 32 + block * 16 + lane);
    return halves_at(scales + 2 * lane) * 0.25f * (__builtin_convertvector(group ? both >> 4 : both & 15, Floats) + 0.5f);
  }
};

// Calls `body` with an object of the kind's type.
template <class Body>
RADIXRT_INLINE void with_kind(BlockKind kind, Body&& body) {
  switch (kind) {
    case BlockKind::q4_0: return body(Small<4, 8>{});
    case BlockKind::q4_1: return body(SmallWithMinimum<4>{});
    case BlockKind::q5_0: return body(Small<5, 16>{});
    case BlockKind::q5_1: return body(SmallWithMinimum<5>{});
    case BlockKind::q8_0: return body(Small<8, 128>{});
    case BlockKind::q2_k: return body(Q2K{});
    case BlockKind::q3_k: return body(Q3K{});
    case BlockKind::q4_k: return body(WithMinimum<4>{});
    case BlockKind::q5_k: return body(WithMinimum<5>{});
    case BlockKind::q6_k: return body(SixBits{});
    case BlockKind::iq2_xxs: return body(IQ2XXS{});
    case BlockKind::iq2_xs:
    case BlockKind::iq2_s: return body(IQ2XS{});
    case BlockKind::iq3_xxs: return body(IQ3XXS{});
    case BlockKind::iq3_s: return body(IQ3S{});
    case BlockKind::iq4_nl: return body(IQ4NL{});
    case BlockKind::iq4_xs: return body(IQ4XS{});
    case BlockKind::mxfp4: return body(Floats4Bits{});
  }
}

}  // namespace radixrt::RADIXRT_ISA
