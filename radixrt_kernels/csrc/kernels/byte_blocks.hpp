// Products of queries with coded keys, and of weights with coded values, in integers (VPDPBUSD): four codes are multiplied at a time, and none
// is converted. Integer sums are exact, so their order does not matter.
//
// A left operand is in two bytes: a row of the upper ones and a row of the lower ones, which are multiplied like two rows. Queries have 15 bits
// with the sign, and a scale per row. Weights times the scales of their values have 16 bits, in steps of the largest of these scales.
#pragma once

#include "kernels/attention_blocks.hpp"

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define RADIXRT_HAS_BYTE_BLOCKS

namespace radixrt::RADIXRT_ISA {

inline constexpr int kBytes = 4;  // in a unit

// Left: signed. Right: codes plus 128.
struct KeyBytes {
  using Unit = uint32_t;
  static constexpr int kElements = kBytes;

  static RADIXRT_INLINE UInts load_units(const int8_t* from, int count) {
    const auto there = count < 64 ? (__mmask64)((uint64_t{1} << count) - 1) : ~__mmask64{0};
    return (UInts)_mm512_xor_si512(_mm512_maskz_loadu_epi8(there, from), _mm512_set1_epi8(-128));
  }

  static RADIXRT_INLINE Floats multiply_add(Floats sum, const uint32_t* left, UInts right) {
    return (Floats)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)right, _mm512_set1_epi32(*left));
  }
};

// Left: unsigned. Right: codes.
struct ValueBytes {
  using Unit = uint32_t;
  static RADIXRT_INLINE Floats multiply_add(Floats sum, const uint32_t* left, UInts right) {
    return (Floats)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(*left), (__m512i)right);
  }

  // Rows of kBlockKeys upper bytes and kBlockKeys lower bytes. `weights`: 0 to 65535.
  static RADIXRT_INLINE void pack_weights(Floats weights, int first, uint32_t* to) {
    __m512i whole = _mm512_cvtps_epi32((__m512)weights);
    auto bytes = reinterpret_cast<char*>(to) + first;
    _mm_storeu_si128((__m128i*)bytes, _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8)));
    _mm_storeu_si128((__m128i*)(bytes + kBlockKeys), _mm512_cvtepi32_epi8(whole));
  }
};

// Integers modulo 2^32, of products of upper bytes and of lower bytes.
template <int kLowerBits>
RADIXRT_INLINE UInts both_bytes(const float* upper, const float* lower) {
  return ((UInts)load(upper) << kLowerBits) + (UInts)load(lower);
}

RADIXRT_INLINE Floats to_floats(UInts whole) { return __builtin_convertvector((Ints)whole, Floats); }

// A query in two bytes: 128 times the first ones plus the second ones, which are -64 to 63.
struct QueryScale {
  float scale;    // of the integers; NaN if an element is not finite
  uint32_t excess;  // of the products with codes plus 128

  // to[2][units], padded with zeros.
  void pack(const float* query, int head_dim, int units, int8_t* to) {
    constexpr int kMost = 127 * 128;
    float most = 0, odd = 0;
    for (int i = 0; i < head_dim; ++i) {
      float magnitude = query[i] < 0 ? -query[i] : query[i];
      most = magnitude > most ? magnitude : most;
      odd += query[i] - query[i];
    }
    scale = most / kMost + odd;
    const float inverse = most > 0x1p-100f ? kMost / most : 0;
    int8_t *upper = to, *lower = to + kBytes * units;
    memset(to, 0, 2 * kBytes * units);
    int32_t sum = 0;
    for (int i = 0; i < head_dim; ++i) {
      const float shift = 12582912.0f;  // 1.5 * 2^23: after the addition, the low bits are the nearest integer
      float shifted = query[i] * inverse + shift;
      int32_t whole;
      memcpy(&whole, &shifted, sizeof whole);
      whole = (whole << 10) >> 10;
      upper[i] = static_cast<int8_t>((whole + 64) >> 7);
      lower[i] = static_cast<int8_t>(whole - ((whole + 64) >> 7) * 128);
      sum += 128 * upper[i] + lower[i];
    }
    excess = static_cast<uint32_t>(sum) * 128u;
  }

  // `products`: two rows of [kBlockKeys]. The result fits in 32 bits, whatever the upper bytes' part is.
  RADIXRT_INLINE Floats scores(const float* products) const { return to_floats(both_bytes<7>(products, products + kBlockKeys) - excess); }
};

// The scales of a block's values in steps of a 65535th of the largest visible one. Others are 0: no bit may depend on keys that a query
// does not see.
struct WeightSteps {
  alignas(64) float of_keys[kBlockKeys];
  float step;  // NaN if a visible scale is

  RADIXRT_INLINE void set(const float* scales, Visible seen) {
    __m512i most = _mm512_setzero_si512();  // scales are not negative, so their bits are in their order, and NaN is the largest
    for (int i = 0; i < kBlockKeys; i += kWidth) {
      Ints lane = lane_numbers() + i;
      Floats visible = (lane >= seen.begin) & (lane < seen.end) ? load(scales + i) : splat(0.0f);
      store(of_keys + i, visible);
      most = _mm512_max_epu32(most, (__m512i)visible);
    }
    const uint32_t bits = _mm512_reduce_max_epu32(most);
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    const float inverse = largest > 0x1p-100f ? 65535 / largest : 0;
    for (int i = 0; i < kBlockKeys; i += kWidth) store(of_keys + i, load(of_keys + i) * inverse);
    step = largest / 65535;
  }
};

struct ByteBlocks {
  static constexpr int kWeightUnits = kBlockKeys / kBytes;

  static int key_units(int head_dim) { return rounded_up(head_dim, kBytes) / kBytes; }
  static int value_width(int head_dim) { return rounded_up(head_dim, 64); }

  // to[keys / 4][value_width]; the last value stands for those behind it.
  static void pack_values(const int8_t* const* values, int64_t offset, int count, int head_dim, uint32_t* to) {
    // After this permutation of a row, the lanes of the result have consecutive features.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const int width = value_width(head_dim);
    for (int key = 0; key < count; key += kBytes, to += width) {
      const int8_t* rows[kBytes];
      for (int row = 0; row < kBytes; ++row) rows[row] = values[key + row < count ? key + row : count - 1] + offset;
      for (int i = 0; i < head_dim; i += 64) {
        const auto there = head_dim - i < 64 ? (__mmask64)((uint64_t{1} << (head_dim - i)) - 1) : ~__mmask64{0};
        __m512i of_key[kBytes];
#pragma GCC unroll 4
        for (int row = 0; row < kBytes; ++row)
          of_key[row] = _mm512_permutexvar_epi32(order, _mm512_maskz_loadu_epi8(there, rows[row] + i));
        __m512i low01 = _mm512_unpacklo_epi8(of_key[0], of_key[1]), high01 = _mm512_unpackhi_epi8(of_key[0], of_key[1]);
        __m512i low23 = _mm512_unpacklo_epi8(of_key[2], of_key[3]), high23 = _mm512_unpackhi_epi8(of_key[2], of_key[3]);
        _mm512_storeu_si512(to + i, _mm512_unpacklo_epi16(low01, low23));
        _mm512_storeu_si512(to + i + 16, _mm512_unpackhi_epi16(low01, low23));
        _mm512_storeu_si512(to + i + 32, _mm512_unpacklo_epi16(high01, high23));
        _mm512_storeu_si512(to + i + 48, _mm512_unpackhi_epi16(high01, high23));
      }
    }
  }

  // sums[rows][width] = factors[rows] * sums + steps[rows] * products. `products`: two rows each.
  static void add_products(const float* products, int rows, int width, const float* factors, const float* steps, float* sums) {
    for (int row = 0; row < rows; ++row, products += 2 * width, sums += width)
      for (int i = 0; i < width; i += kWidth)
        store(sums + i, factors[row] * load(sums + i) + steps[row] * to_floats(both_bytes<8>(products + i, products + width + i)));
  }
};

}  // namespace radixrt::RADIXRT_ISA

#endif
