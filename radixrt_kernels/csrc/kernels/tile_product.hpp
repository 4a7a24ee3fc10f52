// Products of small packed matrices: the inner loop of attention.
//
// The elements of an operand are *units*: float32, or two bfloat16 that one instruction multiplies and adds (VDPBF16PS). The left
// operand is a matrix of units by rows. The right operand is a sequence of vectors of units. Each vector is multiplied by a unit of the
// left operand, broadcast to all lanes.
#pragma once

#include "kernels/attention.hpp"
#include "simd.hpp"

namespace radixrt::RADIXRT_ISA {

// Prefetches the rows of the next block, one line at a time between other work. The order of pages in memory is random, so the hardware
// prefetcher cannot predict it. Prefetching all rows at once stalls, because the processor keeps only some twenty misses in flight.
struct Prefetcher {
  const char* const* row;
  const char* const* end;
  int row_bytes;
  int byte = 0;

  template <int locality = 3>  // 2: into the second-level cache, not the first
  RADIXRT_INLINE void step() {
    if (row == end) return;
    __builtin_prefetch(*row + byte, 0, locality);
    byte += 64;
    if (byte >= row_bytes) {
      byte = 0;
      ++row;
    }
  }

  RADIXRT_INLINE void steps(int count) {
    for (int i = 0; i < count; ++i) step();
  }
};

// Number of accumulators: as many as the registers allow besides the right operand's vectors.
inline constexpr int kRowsAtOnce = 6;
#if defined(__AVX512F__)
inline constexpr int kVectorsAtOnce = 4;
#else
inline constexpr int kVectorsAtOnce = 2;
#endif

RADIXRT_INLINE int rounded_up(int count, int multiple) { return (count + multiple - 1) / multiple * multiple; }

// Units of float32, for every storage type.
struct FloatUnits {
  using Unit = float;
  static constexpr int kElements = 1;

  static RADIXRT_INLINE Floats multiply_add(Floats sum, const float* left, UInts right) { return sum + *left * (Floats)right; }

  // Converts `count` elements to units, padded with zeros.
  template <class S>
  static RADIXRT_INLINE void pack_row(const S* from, int count, float* to) {
    int i = 0;
    for (; i + kWidth <= count; i += kWidth) store(to + i, load(from + i));
    if (i < count) store(to + i, load_first(from + i, count - i));
  }

  static RADIXRT_INLINE void pack_weights(Floats weights, int first, float* to) { store(to + first, weights); }

  template <class S>
  static RADIXRT_INLINE UInts load_units(const S* from, int count) {
    return (UInts)(count >= kWidth ? load(from) : load_first(from, count));
  }

  // The elements `elements` of a value.
  template <class S>
  static RADIXRT_INLINE void load_values(const S* const* rows, int64_t offset, int count, int elements, UInts (&to)[1]) {
    (void)count;
    to[0] = load_units(rows[0] + offset, elements);
  }

  // Packs rows of values as the right operand [keys][padded head_dim].
  template <class S>
  static RADIXRT_INLINE void pack_values(const S* const* rows, int count, int head_dim, int padded, float* to, Prefetcher& next) {
    for (int key = 0; key < count; ++key) {
      next.step();
      pack_row(rows[key], head_dim, to + key * padded);
    }
  }
};

#if defined(__AVX512BF16__)
// Pairs of bfloat16: neighbouring features of queries and keys, neighbouring keys of weights and values.
struct PairUnits {
  using Unit = uint32_t;
  static constexpr int kElements = 2;

  static RADIXRT_INLINE Floats multiply_add(Floats sum, const uint32_t* left, UInts right) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(*left), (__m512bh)right);
  }

  static RADIXRT_INLINE void pack_row(const BFloat16* from, int count, uint32_t* to) { memcpy(to, from, count * sizeof *from); }

  static RADIXRT_INLINE void pack_weights(Floats weights, int first, uint32_t* to) {
    auto rounded = _mm512_cvtneps_pbh((__m512)weights);
    memcpy(reinterpret_cast<BFloat16*>(to) + first, &rounded, sizeof rounded);
  }

  static RADIXRT_INLINE UInts load_units(const BFloat16* from, int count) {  // `count`: elements
    if (count >= 2 * kWidth) return (UInts)_mm512_loadu_si512(from);
    return (UInts)_mm512_maskz_loadu_epi16((__mmask32)((uint64_t{1} << count) - 1), from);
  }

  static RADIXRT_INLINE UInts load_units(const int8_t* from, int count) {
    __m256i bytes = _mm256_maskz_loadu_epi8(count >= 2 * kWidth ? ~__mmask32{0} : (__mmask32)((uint64_t{1} << count) - 1), from);
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    return (UInts)_mm512_cvtne2ps_pbh(high, low);
  }

  // `elements` of two values, or of the last one and zeros, interleaved within lanes of 128 bits.
  template <class S>
  static RADIXRT_INLINE void load_values(const S* const* rows, int64_t offset, int count, int elements, UInts (&to)[2]) {
    auto first = (__m512i)load_units(rows[0] + offset, elements);
    auto second = count > 1 ? (__m512i)load_units(rows[1] + offset, elements) : __m512i{};
    to[0] = (UInts)_mm512_unpacklo_epi16(first, second);
    to[1] = (UInts)_mm512_unpackhi_epi16(first, second);
  }

  // Restores the element order of sums of `load_values`: 2 * kWidth floats in place.
  static RADIXRT_INLINE void put_in_order(float* sums) {
    Floats low = load(sums), high = load(sums + kWidth);
    store(sums, pick<0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23>(low, high));
    store(sums + kWidth, pick<8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31>(low, high));
  }

  template <class S>
  static RADIXRT_INLINE void pack_values(const S* const* rows, int count, int head_dim, int padded, uint32_t* to, Prefetcher& next) {
    for (int key = 0; key < count; key += 2) {
      next.steps(2);
      const S* first = rows[key];
      const S* second = key + 1 < count ? rows[key + 1] : nullptr;
      for (int i = 0; i < head_dim; i += kWidth) {
        UInts low = widened(first + i, head_dim - i);
        UInts high = second ? widened(second + i, head_dim - i) : UInts{};
        UInts pairs = low | high << 16;
        memcpy(to + key / 2 * padded + i, &pairs, sizeof pairs);
      }
    }
  }

 private:
  static RADIXRT_INLINE UInts widened(const BFloat16* from, int count) {
    if (count >= kWidth) return __builtin_convertvector(load_bits(from), UInts);
    return (UInts)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1), from));
  }

  static RADIXRT_INLINE UInts widened(const int8_t* from, int count) {
    __m128i bytes = _mm_maskz_loadu_epi8(count >= kWidth ? (__mmask16)~0u : (__mmask16)((1u << count) - 1), from);
    return (UInts)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)) >> 16;  // a small integer needs no lower bits
  }
};
#endif

// Packs rows of keys, at `offset` elements in each, as the right operand [units of head_dim][kBlockKeys]; missing keys are zero.
template <class Units, class T>
RADIXRT_INLINE void pack_keys(const T* const* rows, int64_t offset, int count, int head_dim, typename Units::Unit* to, auto& next) {
  constexpr int kStep = kWidth * Units::kElements;  // elements in a vector of units
  for (int key = 0; key < kBlockKeys && key < count; key += kWidth) {
    for (int i = 0; i < head_dim; i += kStep) {
      next.steps(kWidth / 4);
      UInts tile[kWidth];
#pragma GCC unroll 16
      for (int row = 0; row < kWidth; ++row)
        tile[row] = key + row < count ? Units::load_units(rows[key + row] + offset + i, head_dim - i) : UInts{};
      transpose(tile);
      int units = head_dim - i < kStep ? (head_dim - i + Units::kElements - 1) / Units::kElements : kWidth;
      for (int unit = 0; unit < units; ++unit)
        memcpy(to + (i / Units::kElements + unit) * kBlockKeys + key, &tile[unit], sizeof tile[unit]);
    }
  }
}

// result[rows][vectors] = factors[rows] * result + left[rows][depth] * right[depth][vectors]; without factors, result is not read.
template <class Units, int rows, int vectors>
RADIXRT_INLINE void multiply_block(const typename Units::Unit* left, int left_stride, const typename Units::Unit* right,
                                   int right_stride, int depth, const float* factors, float* result, int result_stride,
                                   auto& next) {
  Floats sums[rows][vectors] = {};
  for (int k = 0; k < depth; ++k) {
    next.step();
#pragma GCC unroll 8
    for (int row = 0; row < rows; ++row)
#pragma GCC unroll 4
      for (int vector = 0; vector < vectors; ++vector) {
        UInts units;
        memcpy(&units, right + k * right_stride + vector * kWidth, sizeof units);
        sums[row][vector] = Units::multiply_add(sums[row][vector], left + row * left_stride + k, units);
      }
  }
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row)
#pragma GCC unroll 4
    for (int vector = 0; vector < vectors; ++vector) {
      float* place = result + row * result_stride + vector * kWidth;
      store(place, factors ? factors[row] * load(place) + sums[row][vector] : sums[row][vector]);
    }
}

template <class Units, int vectors>
static void multiply_columns(const typename Units::Unit* left, int left_stride, int rows,
                                     const typename Units::Unit* right, int right_stride, int depth, const float* factors,
                                     float* result, int result_stride, auto& next) {
  // Seven rows are computed as four and three, not as six and one: a block of one row has too few independent sums.
  int blocks = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  for (int block = 0, row = 0; block < blocks; ++block) {
    int count = (rows - row) / (blocks - block);
    auto from = left + row * left_stride;
    auto factor = factors ? factors + row : nullptr;
    float* to = result + row * result_stride;
    switch (count) {
#define RADIXRT_CASE(n) \
  case n:               \
    multiply_block<Units, n, vectors>(from, left_stride, right, right_stride, depth, factor, to, result_stride, next); \
    break;
      RADIXRT_CASE(1)
      RADIXRT_CASE(2)
      RADIXRT_CASE(3)
      RADIXRT_CASE(4)
      RADIXRT_CASE(5)
      RADIXRT_CASE(6)
#undef RADIXRT_CASE
    }
    row += count;
  }
}

// result[rows][columns] = factors * result + left * right, where columns are a multiple of kWidth; strides are those of rows.
template <class Units>
RADIXRT_INLINE void multiply(const typename Units::Unit* left, int left_stride, int rows, const typename Units::Unit* right,
                             int right_stride, int columns, int depth, const float* factors, float* result, int result_stride,
                                   auto& next) {
  int column = 0;
  for (; column + kVectorsAtOnce * kWidth <= columns; column += kVectorsAtOnce * kWidth)
    multiply_columns<Units, kVectorsAtOnce>(left, left_stride, rows, right + column, right_stride, depth, factors,
                                            result + column, result_stride, next);
  for (; column < columns; column += kWidth)
    multiply_columns<Units, 1>(left, left_stride, rows, right + column, right_stride, depth, factors, result + column,
                               result_stride, next);
}

}  // namespace radixrt::RADIXRT_ISA
