// The widest float vectors of the instruction set that a file is compiled for, and conversions from and to half precision.
//
// Arithmetic uses the compiler's operators on vector types (`a * b + c` becomes a fused multiply-add). Intrinsics are used only for
// operations without an operator. All code is in the namespace of the instruction set: the linker could otherwise keep the version of a
// function that the processor does not support. For the same reason kernels use no templates of the standard library.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace radixrt {

// Storage types of torch's tensors.
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

#define RADIXRT_INLINE inline __attribute__((always_inline))

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
// A multiplication adjusts the exponent; it also converts subnormal numbers correctly.
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

RADIXRT_INLINE Floats load(const int8_t* from) {
  typedef int8_t Bytes __attribute__((vector_size(kWidth)));
  Bytes bytes;
  memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, Floats);
}

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

// The second operand if one is NaN.
#if defined(__AVX512F__)
RADIXRT_INLINE Floats maximum(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
RADIXRT_INLINE Floats minimum(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }
#else
RADIXRT_INLINE Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
RADIXRT_INLINE Floats minimum(Floats a, Floats b) { return a < b ? a : b; }
#endif

// Elements of `a` and `b` by their indices; those of `b` count from kWidth on.
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define RADIXRT_HAS_SHUFFLEVECTOR
#endif
#endif
template <int... indices, class Vector>
RADIXRT_INLINE Vector pick(Vector a, Vector b) {
#if defined(RADIXRT_HAS_SHUFFLEVECTOR)
  return __builtin_shufflevector(a, b, indices...);
#else
  return __builtin_shuffle(a, b, Ints{indices...});
#endif
}

template <int... lanes>
struct Lanes {};
#if defined(__AVX512F__)
using AllLanes = Lanes<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>;
#elif defined(__AVX2__)
using AllLanes = Lanes<0, 1, 2, 3, 4, 5, 6, 7>;
#else
using AllLanes = Lanes<0, 1, 2, 3>;
#endif

// Swaps lanes at the distance `distance` (a power of two).
template <int distance, int... lanes>
RADIXRT_INLINE Floats swap_lanes(Floats x, Lanes<lanes...>) {
  return pick<(lanes ^ distance)...>(x, x);
}

template <int distance = kWidth / 2>
RADIXRT_INLINE float sum(Floats x) {
  x = x + swap_lanes<distance>(x, AllLanes{});
  if constexpr (distance == 1)
    return x[0];
  else
    return sum<distance / 2>(x);
}

template <int distance = kWidth / 2>
RADIXRT_INLINE float largest(Floats x) {
  x = maximum(x, swap_lanes<distance>(x, AllLanes{}));
  if constexpr (distance == 1)
    return x[0];
  else
    return largest<distance / 2>(x);
}

template <int distance, int... lanes>
RADIXRT_INLINE void swap_blocks(UInts& upper, UInts& lower, Lanes<lanes...>) {
  UInts left = pick<(lanes & distance ? kWidth + lanes - distance : lanes)...>(upper, lower);
  lower = pick<(lanes & distance ? kWidth + lanes : lanes + distance)...>(upper, lower);
  upper = left;
}

// Transposes kWidth rows: swaps off-diagonal blocks of decreasing size.
template <int distance = kWidth / 2>
RADIXRT_INLINE void transpose(UInts (&rows)[kWidth]) {
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i)
    if (!(i & distance)) swap_blocks<distance>(rows[i], rows[i | distance], AllLanes{});
  if constexpr (distance > 1) transpose<distance / 2>(rows);
}

// 2^x for x in [-1/2, 1/2]: Taylor polynomial, error up to one unit in the last place.
RADIXRT_INLINE Floats exp2_of_fraction(Floats x) {
  Floats p = splat(1.5403530393381609954e-4f);
  p = p * x + 1.3333558146428443423e-3f;
  p = p * x + 9.6181291076284771619e-3f;
  p = p * x + 5.5504108664821579953e-2f;
  p = p * x + 2.4022650695910071233e-1f;
  p = p * x + 6.9314718055994530942e-1f;
  return p * x + 1.0f;
}

// 2^x; infinity from 128 on, 0 below -126 or a subnormal number, NaN for NaN.
#if defined(__AVX512F__)
RADIXRT_INLINE Floats exp2(Floats x) {
  Floats whole = (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  whole = maximum(splat(-200.0f), whole);  // minus infinity has no fraction; for NaN, the second operand is returned
  Floats p = exp2_of_fraction(maximum(splat(-200.0f), x) - whole);
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)whole);
}
#else
RADIXRT_INLINE Floats exp2(Floats x) {
  const float shift = 12582912.0f;  // 1.5 * 2^23: after the addition, the low bits are the nearest integer
  Floats shifted = maximum(minimum(x, splat(127.5f)), splat(-127.5f)) + shift;
  Ints power = (Ints)shifted << 23;  // the integer as exponent
  Floats result = (Floats)((Ints)exp2_of_fraction(x - (shifted - shift)) + power);
  result = x < -126.0f ? splat(0.0f) : result;
  result = x >= 128.0f ? splat(__builtin_inff()) : result;
  return x == x ? result : x;
}
#endif

RADIXRT_INLINE Floats exp(Floats x) { return exp2(x * 1.44269504088896341f); }

}  // namespace RADIXRT_ISA
}  // namespace radixrt
