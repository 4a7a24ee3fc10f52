// The two products of attention for few rows, without packing keys and values.
//
// Scores: vectors of kWidth keys are transposed in registers. Values: each vector is loaded once for all rows. bfloat16 values of two keys
// are interleaved to pairs. Sums are in the order of `multiply` in tile_product.hpp, because the bits of a row must not depend on the
// number of rows.
#pragma once

#include "kernels/tile_product.hpp"
#include "simd.hpp"

namespace radixrt::RADIXRT_ISA {

// Measured: up to this number of rows it is faster than with packed keys. With narrow vectors, few sums fit in the registers.
inline constexpr int kFewRows = kWidth == 16 ? 4 : kWidth == 8 ? 1 : 0;

// Prefetches a block of many heads into the second-level cache, spread over the work on the block before it.
struct FarPrefetcher {
  Prefetcher block;
  int lines_a_step;

  FarPrefetcher(const Prefetcher& block, int steps)
      : block(block), lines_a_step(int((block.end - block.row) * ((block.row_bytes + 63) / 64) / steps) + 1) {}

  RADIXRT_INLINE void step() {
    for (int i = 0; i < lines_a_step; ++i) block.step<2>();
  }

  RADIXRT_INLINE void steps(int count) {
    for (int i = 0; i < count; ++i) step();
  }
};

// S: as keys and values are stored.
template <class S, class Units>
struct FewRows {
  using Unit = typename Units::Unit;
  static constexpr int kElementsAtOnce = kWidth * Units::kElements;
  static constexpr int kRows = 4;  // rows per loaded value

  // Number of prefetcher steps in a block of one head.
  static int steps(int rows, int keys, int head_dim) {
    int vectors = (head_dim + kElementsAtOnce - 1) / kElementsAtOnce;
    return vectors * (rows * (keys / kWidth) + (rows + kRows - 1) / kRows * (keys / Units::kElements));
  }

  // scores[rows][kBlockKeys] = queries times keys, at `offset` elements in each row.
  static void score(const Unit* queries, int rows, const S* const* keys, int64_t offset, int count, int head_dim, float* scores,
                    FarPrefetcher& next) {
    const int units = rounded_up(head_dim, kElementsAtOnce) / Units::kElements;
    for (int row = 0; row < rows; row += kRows) {
      auto query = queries + row * units;
      float* to = scores + row * kBlockKeys;
      switch (rows - row) {
        case 1: score_rows<1>(query, units, keys, offset, count, head_dim, to, next); break;
        case 2: score_rows<2>(query, units, keys, offset, count, head_dim, to, next); break;
        case 3: score_rows<3>(query, units, keys, offset, count, head_dim, to, next); break;
        default: score_rows<kRows>(query, units, keys, offset, count, head_dim, to, next);
      }
    }
  }

  // output[rows][padded head_dim] = factors[rows] * output + weights[rows][kBlockKeys] times values, in the order of `put_in_order`.
  static void add_values(const Unit* weights, int rows, const S* const* values, int64_t offset, int count, int head_dim,
                         const float* factors, float* output, FarPrefetcher& next) {
    const int wide = rounded_up(head_dim, kElementsAtOnce);
    for (int row = 0; row < rows; row += kRows) {
      auto from = weights + row * kBlockKeys;
      auto factor = factors + row;
      float* to = output + row * wide;
      for (int element = 0; element < wide; element += kElementsAtOnce) {
        switch (rows - row) {
          case 1: add_vector<1>(from, values, offset, count, element, head_dim, factor, to, wide, next); break;
          case 2: add_vector<2>(from, values, offset, count, element, head_dim, factor, to, wide, next); break;
          case 3: add_vector<3>(from, values, offset, count, element, head_dim, factor, to, wide, next); break;
          default: add_vector<kRows>(from, values, offset, count, element, head_dim, factor, to, wide, next);
        }
      }
    }
  }

  // Restores the order of the elements after interleaving.
  static void put_in_order(float* output, int wide) {
    if constexpr (Units::kElements == 2)
      for (int i = 0; i < wide; i += kElementsAtOnce) Units::put_in_order(output + i);
  }

 private:
  template <int rows>
  static RADIXRT_INLINE void score_rows(const Unit* queries, int stride, const S* const* keys, int64_t offset, int count, int head_dim,
                                        float* scores, FarPrefetcher& next) {
    // The features are the outer loop: the sums of a vector of keys depend on one another, those of the next keys do not.
    for (int element = 0; element < head_dim; element += kElementsAtOnce) {
      const Unit* query = queries + element / Units::kElements;
      const int left = head_dim - element;
      for (int key = 0; key < count; key += kWidth) {
        const S* const* from = keys + key;
        const int last = count - key - 1;
        for (int row = 0; row < rows; ++row) next.step();
        Floats sums[rows];
        for (int row = 0; row < rows; ++row) sums[row] = element ? load(scores + row * kBlockKeys + key) : splat(0.0f);
        UInts units[kWidth];
        if (left >= kElementsAtOnce && last >= kWidth - 1) {
#pragma GCC unroll 16
          for (int i = 0; i < kWidth; ++i) units[i] = Units::load_units(from[i] + offset + element, kElementsAtOnce);
          transpose(units);
#pragma GCC unroll 16
          for (int unit = 0; unit < kWidth; ++unit)
            for (int row = 0; row < rows; ++row)
              sums[row] = Units::multiply_add(sums[row], query + row * stride + unit, units[unit]);
        } else {
          for (int i = 0; i < kWidth; ++i) units[i] = Units::load_units(from[i < last ? i : last] + offset + element, left);
          transpose(units);
          for (int unit = 0; unit < kWidth && unit * Units::kElements < left; ++unit)
            for (int row = 0; row < rows; ++row)
              sums[row] = Units::multiply_add(sums[row], query + row * stride + unit, units[unit]);
        }
        for (int row = 0; row < rows; ++row) store(scores + row * kBlockKeys + key, sums[row]);
      }
    }
  }

  template <int rows>
  static RADIXRT_INLINE void add_vector(const Unit* weights, const S* const* values, int64_t offset, int count, int element,
                                        int head_dim, const float* factors, float* output, int wide, FarPrefetcher& next) {
    constexpr int kVectors = Units::kElements;
    const int left = head_dim - element < kElementsAtOnce ? head_dim - element : kElementsAtOnce;
    Floats sums[rows][kVectors] = {};
    for (int key = 0; key < count; key += Units::kElements) {
      next.step();
      UInts loaded[kVectors];
      if (left == kElementsAtOnce)
        Units::load_values(values + key, offset + element, count - key, kElementsAtOnce, loaded);
      else
        Units::load_values(values + key, offset + element, count - key, left, loaded);
#pragma GCC unroll 4
      for (int row = 0; row < rows; ++row)
        for (int i = 0; i < kVectors; ++i)
          sums[row][i] = Units::multiply_add(sums[row][i], weights + row * kBlockKeys + key / Units::kElements, loaded[i]);
    }
#pragma GCC unroll 4
    for (int row = 0; row < rows; ++row)
      for (int i = 0; i < kVectors; ++i) {
        float* place = output + row * wide + element + i * kWidth;
        store(place, factors[row] * load(place) + sums[row][i]);
      }
  }
};

}  // namespace radixrt::RADIXRT_ISA
