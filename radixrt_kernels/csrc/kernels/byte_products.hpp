// Integer products of unsigned codes and activations that are rounded to 8 bits, for linear layers of every quantized form.
//
// Codes are stored in panels of 16 output features. One step of a panel is a line of 64 bytes: four columns of each output.
#pragma once

#include "kernels/linear.hpp"
#include "simd.hpp"

namespace radixrt::RADIXRT_ISA {

inline constexpr int kVectors = kPanel / kWidth;  // vectors that hold one panel's sums
inline constexpr int kStepBytes = 4 * kPanel;

#if defined(__AVX512F__)
inline constexpr int kTileTokens = 6, kTilePanels = 4;
#else
inline constexpr int kTileTokens = kWidth == 8 ? 4 : 2, kTilePanels = 1;
#endif

// ------------------------------------------------------------ bytes

RADIXRT_INLINE UInts codes_at(const uint8_t* from) {
  UInts codes;
  memcpy(&codes, from, sizeof codes);
  return codes;
}

// kWidth bytes. With conversions by the compiler, GCC converts lane by lane.
RADIXRT_INLINE Ints widened(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  typedef uint8_t Bytes __attribute__((vector_size(kWidth)));
  Bytes bytes;
  memcpy(&bytes, from, sizeof bytes);
  return (Ints)__builtin_convertvector(__builtin_convertvector(bytes, Shorts), UInts);
#endif
}

RADIXRT_INLINE Ints widened(const int8_t* from) {
  return widened(reinterpret_cast<const uint8_t*>(from)) << 24 >> 24;
}

RADIXRT_INLINE Floats bytes_at(const uint8_t* from) { return __builtin_convertvector(widened(from), Floats); }
RADIXRT_INLINE Floats bytes_at(const int8_t* from) { return __builtin_convertvector(widened(from), Floats); }

// The lowest byte of each number.
RADIXRT_INLINE void put_bytes(int8_t* to, Ints numbers) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)numbers));
#else
  typedef int8_t Bytes __attribute__((vector_size(kWidth)));
  Bytes bytes = __builtin_convertvector(numbers, Bytes);
  memcpy(to, &bytes, sizeof bytes);
#endif
}

// ------------------------------------------------------------ four columns: codes (unsigned) times activations (signed)

#if defined(__AVX512VNNI__)

using Four = int32_t;  // of bytes

RADIXRT_INLINE void put_four(Four* to, const int8_t* x) { memcpy(to, x, 4); }

RADIXRT_INLINE Ints add_products(Ints sums, UInts codes, const Four& x) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(x));
}

#elif defined(__x86_64__)

struct Four {  // shorts, because pairwise sums of byte products would overflow
  int32_t even, odd;
};

RADIXRT_INLINE void put_four(Four* to, const int8_t* x) {
  *to = {(x[0] & 0xffff) | x[2] << 16, (x[1] & 0xffff) | x[3] << 16};
}

RADIXRT_INLINE Ints add_pairs(UInts codes, int32_t x) {
#if defined(__AVX512BW__)
  return (Ints)_mm512_madd_epi16((__m512i)codes, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
  return (Ints)_mm256_madd_epi16((__m256i)codes, _mm256_set1_epi32(x));
#else
  return (Ints)_mm_madd_epi16((__m128i)codes, _mm_set1_epi32(x));
#endif
}

RADIXRT_INLINE Ints add_products(Ints sums, UInts codes, const Four& x) {
  return sums + add_pairs(codes & 0x00ff00ffu, x.even) + add_pairs(codes >> 8 & 0x00ff00ffu, x.odd);
}

#else

struct Four {
  int32_t of[4];
};

RADIXRT_INLINE void put_four(Four* to, const int8_t* x) { *to = {{x[0], x[1], x[2], x[3]}}; }

RADIXRT_INLINE Ints add_products(Ints sums, UInts codes, const Four& x) {
  return sums + (Ints)(codes & 255u) * x.of[0] + (Ints)(codes >> 8 & 255u) * x.of[1] + (Ints)(codes >> 16 & 255u) * x.of[2] +
         (Ints)(codes >> 24) * x.of[3];
}

#endif

// ------------------------------------------------------------ activations

// Activations that share a scale become integers of at most 127 times it. Infinities and NaN make the scale and the outputs NaN.
struct ActivationScale {
  float scale, inverse;
};

template <class T>
RADIXRT_INLINE ActivationScale scale_of(const T* hidden, int count) {
  Floats most = splat(0), odd = splat(0);
  int whole = count - count % kWidth, rest = count % kWidth;
  auto see = [&](Floats x) {
    most = maximum(most, x < 0.0f ? -x : x);
    odd += x - x;
  };
  for (int i = 0; i < whole; i += kWidth) see(load(hidden + i));
  if (rest) see(load_first(hidden + whole, rest));
  float reach = largest(most);
  return {reach / 127 + sum(odd), reach > 1e-36f ? 127 / reach : 0};
}

// Rounds `count` activations, padded with zeros to a multiple of 8. Returns the sum of the integers.
template <class T>
RADIXRT_INLINE float round_to_fours(const T* hidden, int count, float inverse, Four* fours) {
  Floats total = splat(0);  // exact
  int8_t rounded[kWidth < 8 ? 8 : kWidth];
  for (int i = 0; i < count; i += sizeof rounded) {
    for (int part = 0; part < static_cast<int>(sizeof rounded); part += kWidth) {
      int left = count - i - part;
      Floats x = left >= kWidth ? load(hidden + i + part) : left > 0 ? load_first(hidden + i + part, left) : splat(0);
      const float shift = 12582912.0f;  // 1.5 * 2^23: after the addition, the low bits are the nearest integer
      Ints whole_numbers = (Ints)(minimum(maximum(x * inverse, splat(-127)), splat(127)) + shift) - 0x4b400000;
      put_bytes(rounded + part, whole_numbers);
      total += __builtin_convertvector(whole_numbers, Floats);
    }
    int fours_here = (count - i + 7) / 8 * 2;
    if (fours_here > static_cast<int>(sizeof rounded) / 4) fours_here = sizeof rounded / 4;
    for (int f = 0; f < fours_here; ++f) put_four(fours++, rounded + 4 * f);
  }
  return sum(total);
}

// ------------------------------------------------------------ tiles

template <int kPanels>
struct TokenSums {
  Floats of[kPanels][kVectors];
};

// Writes one token's outputs of `kPanels` panels, with the bias. `Matrix` has `rows`, `bias`, `output` and `output_bytes`.
template <class T, int kPanels, class Matrix>
RADIXRT_INLINE void finish(const Matrix& matrix, int64_t panel, int64_t token, const TokenSums<kPanels>& sums) {
  auto bias = static_cast<const T*>(matrix.bias);
  auto output = reinterpret_cast<T*>(matrix.output + token * matrix.output_bytes);
  for (int p = 0; p < kPanels; ++p) {
    for (int v = 0; v < kVectors; ++v) {
      int64_t row = (panel + p) * kPanel + v * kWidth, left = matrix.rows - row;
      Floats x = sums.of[p][v];
      if (left >= kWidth) {
        store(output + row, bias ? x + load(bias + row) : x);
      } else if (left > 0) {
        int some = static_cast<int>(left);
        store_first(output + row, bias ? x + load_first(bias + row, some) : x, some);
      }
    }
  }
}

}  // namespace radixrt::RADIXRT_ISA
