// The widest float vectors of the instruction set that a file is compiled for, and conversions from and to half precision.
//
// Arithmetic is the compiler's own on vector types (`a * b + c` becomes a fused multiply-add); intrinsics appear only where
// the language has no word. Everything is in the namespace of the instruction set: a function that two of them shared could
// be linked in the version that this processor lacks. For the same reason kernels use no templates of the standard library.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace radixrt {

// Storage types: what tensors of torch hold.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

namespace RADIXRT_ISA {

#if defined(__AVX512F__)
inline constexpr int kWidth = 16;
#elif defined(__AVX2__)
inline constexpr int kWidth = 8;
#else
inline constexpr int kWidth = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));
typedef uint32_t UInts __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Shorts __attribute__((vector_size(2 * kWidth)));

#define RADIXRT_INLINE static inline __attribute__((always_inline, unused))

RADIXRT_INLINE Floats splat(float x) { return Floats{} + x; }

// ------------------------------------------------------------ loads and stores, kWidth elements at any address

RADIXRT_INLINE Floats load(const float* from) {
  Floats x;
  memcpy(&x, from, sizeof x);
  return x;
}

RADIXRT_INLINE void store(float* to, Floats x) { memcpy(to, &x, sizeof x); }

RADIXRT_INLINE Shorts load_bits(const void* from) {
  Shorts bits;
  memcpy(&bits, from, sizeof bits);
  return bits;
}

RADIXRT_INLINE Floats load(const BFloat16* from) {
  return (Floats)(__builtin_convertvector(load_bits(from), UInts) << 16);
}

// Rounds to nearest even; NaN stays NaN.
RADIXRT_INLINE Shorts to_bfloat16(Floats x) {
  UInts bits = (UInts)x;
  UInts rounded = bits + 0x7fff + (bits >> 16 & 1);
  rounded = x == x ? rounded : (bits | 0x400000);
  return __builtin_convertvector(rounded >> 16, Shorts);
}

RADIXRT_INLINE void store(BFloat16* to, Floats x) {
  Shorts bits = to_bfloat16(x);
  memcpy(to, &bits, sizeof bits);
}

#if defined(__AVX512F__)
RADIXRT_INLINE Floats from_float16(Shorts bits) { return (Floats)_mm512_cvtph_ps((__m256i)bits); }
RADIXRT_INLINE Shorts to_float16(Floats x) { return (Shorts)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(__F16C__)
RADIXRT_INLINE Floats from_float16(Shorts bits) { return (Floats)_mm256_cvtph_ps((__m128i)bits); }
RADIXRT_INLINE Shorts to_float16(Floats x) { return (Shorts)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(__aarch64__)
RADIXRT_INLINE Floats from_float16(Shorts bits) { return (Floats)vcvt_f32_f16((float16x4_t)bits); }
RADIXRT_INLINE Shorts to_float16(Floats x) { return (Shorts)vcvt_f16_f32((float32x4_t)x); }
#else
// The exponent is moved by a multiplication, which also makes the subnormal ones come out right.
RADIXRT_INLINE Floats from_float16(Shorts bits) {
  UInts wide = __builtin_convertvector(bits, UInts);
  UInts sign = (wide & 0x8000) << 16, magnitude = (wide & 0x7fff) << 13;
  UInts moved = (UInts)((Floats)magnitude * 0x1p112f);
  moved = magnitude >= (0x7c00u << 13) ? (magnitude | 0x7f800000) : moved;  // infinity and NaN
  return (Floats)(moved | sign);
}
RADIXRT_INLINE Shorts to_float16(Floats x) {
  UInts bits = (UInts)x, sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  UInts subnormal = (UInts)((Floats)magnitude + 0.5f) - 0x3f000000;  // the addition rounds at 2^-24
  UInts normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
  UInts half = magnitude < (113u << 23) ? subnormal : normal;
  half = magnitude >= (143u << 23) ? (UInts{} + 0x7c00) : half;
  half = magnitude > 0x7f800000 ? (UInts{} + 0x7e00) : half;
  return __builtin_convertvector(half | sign, Shorts);
}
#endif

RADIXRT_INLINE Floats load(const Float16* from) { return from_float16(load_bits(from)); }

RADIXRT_INLINE void store(Float16* to, Floats x) {
  Shorts bits = to_float16(x);
  memcpy(to, &bits, sizeof bits);
}

// The first `count` < kWidth elements; the others are zero.
template <class T>
RADIXRT_INLINE Floats load_first(const T* from, int count) {
  T padded[kWidth];
  memset(padded, 0, sizeof padded);
  memcpy(padded, from, count * sizeof(T));
  return load(padded);
}

template <class T>
RADIXRT_INLINE void store_first(T* to, Floats x, int count) {
  T padded[kWidth];
  store(padded, x);
  memcpy(to, padded, count * sizeof(T));
}

// ------------------------------------------------------------ functions

RADIXRT_INLINE Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
RADIXRT_INLINE Floats minimum(Floats a, Floats b) { return a < b ? a : b; }

RADIXRT_INLINE float sum(Floats x) {
  float total = 0;
  for (int i = 0; i < kWidth; ++i) total += x[i];
  return total;
}

RADIXRT_INLINE float largest(Floats x) {
  float most = x[0];
  for (int i = 1; i < kWidth; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

// 2^x up to 2 units in the last place; 0 below -126, infinity from 128 on, NaN for NaN. Taylor's polynomial on [-1/2, 1/2].
RADIXRT_INLINE Floats exp2(Floats x) {
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
  Floats shifted = maximum(minimum(x, splat(127.5f)), splat(-127.5f)) + shift;
  Floats f = x - (shifted - shift);
  Floats p = splat(1.5403530393381609954e-4f);
  p = p * f + 1.3333558146428443423e-3f;
  p = p * f + 9.6181291076284771619e-3f;
  p = p * f + 5.5504108664821579953e-2f;
  p = p * f + 2.4022650695910071233e-1f;
  p = p * f + 6.9314718055994530942e-1f;
  p = p * f + 1.0f;
  Ints power = (Ints)shifted << 23;  // the whole number, in the exponent's place
  Floats result = (Floats)((Ints)p + power);
  result = x < -126.0f ? splat(0.0f) : result;
  result = x >= 128.0f ? splat(__builtin_inff()) : result;
  return x == x ? result : x;
}

RADIXRT_INLINE Floats exp(Floats x) { return exp2(x * 1.44269504088896341f); }

}  // namespace RADIXRT_ISA
}  // namespace radixrt
