// Integer products of unsigned codes and activations that are rounded to 8 bits, for linear layers of every quantized form.
//
// Codes are stored in panels of 16 output features. One step of a panel is a line of 64 bytes: four columns of each output.
#pragma once

#include "kernels/linear.hpp"
#include "simd.hpp"

namespace radixrt::RADIXRT_ISA {

inline constexpr int kVectors = kPanel / kWidth;  // vectors that hold one panel's sums
inline constexpr int kStepBytes = 4 * kPanel;

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

// Numbers from -128 to 127, as bytes.
RADIXRT_INLINE void put_bytes(int8_t* to, Ints numbers) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)numbers));
#elif defined(__AVX2__)
  __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)numbers), _mm256_extracti128_si256((__m256i)numbers, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(shorts, shorts));
#else
  typedef int8_t Bytes __attribute__((vector_size(kWidth)));
  Bytes bytes = __builtin_convertvector(numbers, Bytes);
  memcpy(to, &bytes, sizeof bytes);
#endif
}

// ------------------------------------------------------------ four columns: codes (unsigned) times activations (signed)
//
// VNNI multiplies bytes and adds four products to 32 bits: AVX-512's on 512 bits, AVX-VNNI's on 256. The stand-in for AVX-VNNI has AVX-512's
// encoding of the same operation, so that it runs on processors without AVX-VNNI; all else of its code is the same. AVX2 adds two products
// of bytes to 16 bits, and saturates. An activation is at most 127, so these sums have room for some steps if codes have at most 6 bits, and
// for one up to 129. Other codes are multiplied as shorts.

#if defined(__AVX512VNNI__)
#define RADIXRT_HAS_VNNI
RADIXRT_INLINE Ints add_fours(Ints sums, UInts codes, int32_t x) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(x));
}
#elif defined(__AVXVNNI__) || defined(RADIXRT_EVEX_VNNI)
#define RADIXRT_HAS_VNNI
#if defined(RADIXRT_EVEX_VNNI)
#define RADIXRT_ENCODING "%{evex%} "
#else
#define RADIXRT_ENCODING "%{vex%} "
#endif
RADIXRT_INLINE Ints add_fours(Ints sums, UInts codes, int32_t x) {
  __asm__(RADIXRT_ENCODING "vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(codes), "x"(_mm256_set1_epi32(x)));
  return sums;
}
#endif

#if defined(RADIXRT_HAS_VNNI)
inline constexpr bool kHasBytes = true, kHasShorts = false;
#else
inline constexpr bool kHasBytes = kWidth == 8, kHasShorts = true;
#endif

// Whether codes up to `kLargest` are multiplied as bytes.
template <int kLargest>
inline constexpr bool kInBytes = kHasBytes && (!kHasShorts || kLargest < 130);

// The largest tile: its sums stay in registers.
#if defined(__AVX512F__)
inline constexpr int kTileTokens = 6, kTilePanels = 4;
#else
inline constexpr int kTileTokens = kWidth == 8 ? 4 : 2, kTilePanels = 1;
#endif

// Adds now. With a plain addition GCC computes the products of many steps first, and keeps them on the stack until the sums are used.
RADIXRT_INLINE Ints add_now(Ints sums, Ints products) {
#if defined(__AVX__) && !defined(__AVX512F__)
  Ints result;
  __asm__("vpaddd %2, %1, %0" : "=x"(result) : "x"(sums), "x"(products));
  return result;
#else
  return sums + products;
#endif
}

template <bool kBytes>
struct Operands {
  struct Four {  // activations
    int32_t bytes;
  };
  struct Codes {
    UInts bytes;
  };
  static RADIXRT_INLINE Four four(const int8_t* x) {
    Four four;
    memcpy(&four, x, sizeof four);
    return four;
  }
  static RADIXRT_INLINE Codes codes(UInts codes) { return {codes}; }
};

template <>
struct Operands<false> {
  struct Codes {
    UInts even, odd;  // shorts
  };
#if defined(__AVX2__) && !defined(__AVX512F__)
  static RADIXRT_INLINE Codes codes(UInts codes) { return {codes & 0x00ff00ffu, (UInts)_mm256_srli_epi16((__m256i)codes, 8)}; }
#else
  static RADIXRT_INLINE Codes codes(UInts codes) { return {codes & 0x00ff00ffu, codes >> 8 & 0x00ff00ffu}; }
#endif
#if defined(__x86_64__)
  struct Four {
    int32_t even, odd;  // shorts
  };
  static RADIXRT_INLINE Four four(const int8_t* x) { return {(x[0] & 0xffff) | x[2] << 16, (x[1] & 0xffff) | x[3] << 16}; }
#else
  struct Four {
    int32_t of[4];
  };
  static RADIXRT_INLINE Four four(const int8_t* x) { return {{x[0], x[1], x[2], x[3]}}; }
#endif
};

template <int kLargest>
using OperandsOf = Operands<kInBytes<kLargest>>;

// The sums of products of a vector of outputs with codes up to `kLargest`. They are complete after each `run` steps, at most kRun.
template <int kLargest, bool kBytes = kInBytes<kLargest>>
struct Products {
  static constexpr int kRun = 1;
  Ints sums;

  RADIXRT_INLINE void add(int /*step*/, int /*run*/, const Operands<false>::Codes& codes, const Operands<false>::Four& x) {
#if defined(__x86_64__)
    sums = add_now(sums, add_pairs(codes.even, x.even));
    sums = add_now(sums, add_pairs(codes.odd, x.odd));
#else
    sums += (Ints)(codes.even & 0xffffu) * x.of[0] + (Ints)(codes.odd & 0xffffu) * x.of[1] + (Ints)(codes.even >> 16) * x.of[2] +
            (Ints)(codes.odd >> 16) * x.of[3];
#endif
  }

 private:
#if defined(__AVX512BW__)
  static RADIXRT_INLINE Ints add_pairs(UInts codes, int32_t x) { return (Ints)_mm512_madd_epi16((__m512i)codes, _mm512_set1_epi32(x)); }
#elif defined(__AVX2__)
  static RADIXRT_INLINE Ints add_pairs(UInts codes, int32_t x) { return (Ints)_mm256_madd_epi16((__m256i)codes, _mm256_set1_epi32(x)); }
#elif defined(__x86_64__)
  static RADIXRT_INLINE Ints add_pairs(UInts codes, int32_t x) { return (Ints)_mm_madd_epi16((__m128i)codes, _mm_set1_epi32(x)); }
#endif
};

#if defined(RADIXRT_HAS_VNNI)
template <int kLargest>
struct Products<kLargest, true> {
  static constexpr int kRun = 1;
  Ints sums;

  RADIXRT_INLINE void add(int, int, const Operands<true>::Codes& codes, const Operands<true>::Four& x) {
    sums = add_fours(sums, codes.bytes, x.bytes);
  }
};
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define RADIXRT_HAS_PAIRS

// Adds now, as `add_now`.
RADIXRT_INLINE __m256i add_shorts_now(__m256i sums, __m256i products) {
  __asm__("vpaddw %2, %1, %0" : "=x"(sums) : "x"(sums), "x"(products));
  return sums;
}

RADIXRT_INLINE __m256i pairs_of(UInts codes, int32_t x) { return _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(x)); }

RADIXRT_INLINE Ints whole_of(__m256i pairs) { return (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }

template <int kLargest>
struct Products<kLargest, true> {
  // Steps whose sums of two products fit in 16 bits together: 2 * 127 * kLargest each.
  static constexpr int kRun = kLargest <= 16 ? 8 : kLargest <= 32 ? 4 : kLargest <= 64 ? 2 : 1;
  static_assert(kRun * 2 * 127 * kLargest < 1 << 15);

  Ints sums;
  __m256i of_run;

  RADIXRT_INLINE void add(int step, int run, const Operands<true>::Codes& codes, const Operands<true>::Four& x) {
    __m256i products = pairs_of(codes.bytes, x.bytes);
    of_run = step % run == 0 ? products : add_shorts_now(of_run, products);
    if (step % run == run - 1) sums = add_now(sums, whole_of(of_run));
  }
};
#endif

// The rounded activations of a token in the forms that some kind of codes is multiplied with, one after the other.
struct Activations {
  char* first;
  int64_t count;  // a multiple of 4

  static RADIXRT_INLINE int64_t bytes(int64_t count) { return end_of<true>(count) + end_of<false>(count); }

  template <bool kBytes>
  RADIXRT_INLINE auto fours() const {
    return reinterpret_cast<typename Operands<kBytes>::Four*>(first + (kBytes ? 0 : end_of<true>(count)));
  }

  // Puts two fours.
  RADIXRT_INLINE void put_eight(int64_t index, const int8_t* x) const {
    if constexpr (kHasBytes) memcpy(fours<true>() + index, x, 8);
    if constexpr (kHasShorts) {
#if defined(__AVX2__) && !defined(__AVX512F__)
      const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
      __m128i shorts = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(fours<false>() + index), _mm_shuffle_epi8(shorts, order));
#else
      for (int i = 0; i < 2; ++i) fours<false>()[index + i] = Operands<false>::four(x + 4 * i);
#endif
    }
  }

 private:
  template <bool kBytes>
  static RADIXRT_INLINE int64_t end_of(int64_t count) {
    constexpr bool kHas = kBytes ? kHasBytes : kHasShorts;
    return kHas ? (count / 4 * static_cast<int64_t>(sizeof(typename Operands<kBytes>::Four)) + 63) / 64 * 64 : 0;
  }
};

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

// Rounds `count` activations, padded with zeros to a multiple of 8, and puts them from number `first` on. Returns sums of the integers: those of
// columns i, i + kWidth, ... in lane i.
template <class T>
RADIXRT_INLINE Floats round_to_bytes(const T* hidden, int count, float inverse, const Activations& to, int64_t first) {
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
    for (int at = 0; at < static_cast<int>(sizeof rounded) && i + at < count; at += 8) to.put_eight((first + i + at) / 4, rounded + at);
  }
  return total;
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
