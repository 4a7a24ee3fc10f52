// The two products of attention for few rows, without packing keys and values.
//
// Scores: vectors of a key times vectors of the query, for kWidth keys; their sums are then reduced across lanes together. Values: each
// vector is loaded once for all rows. bfloat16 values of two keys are interleaved to pairs.
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
};

// Lane i of the result is the sum of the lanes of vectors[i].
template <int distance = kWidth / 2>
RADIXRT_INLINE Floats sums_of_lanes(Floats (&vectors)[kWidth]) {
#pragma GCC unroll 16
  for (int i = 0; i < distance; ++i) {
    UInts upper = (UInts)vectors[i], lower = (UInts)vectors[i | distance];
    swap_blocks<distance>(upper, lower, AllLanes{});
    vectors[i] = (Floats)upper + (Floats)lower;
  }
  if constexpr (distance > 1) return sums_of_lanes<distance / 2>(vectors);
  return vectors[0];
}

template <class T, class Units>
struct FewRows {
  using Unit = typename Units::Unit;
  static constexpr int kElementsAtOnce = kWidth * Units::kElements;
  static constexpr int kRows = 4;  // rows per loaded value

  // Number of prefetcher steps in a block of one head.
  static int steps(int rows, int keys, int head_dim) {
    int vectors = (head_dim + kElementsAtOnce - 1) / kElementsAtOnce;
    return vectors * (rows * (keys / kWidth) + (rows + kRows - 1) / kRows * (keys / Units::kElements));
  }

  // scores[rows][kBlockKeys] = queries times keys, at `offset` elements in each row; `queries` are padded with zeros.
  static void score(const Unit* queries, int rows, const T* const* keys, int64_t offset, int count, int head_dim, float* scores,
                    FarPrefetcher& next) {
    const int units = rounded_up(head_dim, kElementsAtOnce) / Units::kElements;
    for (int key = 0; key < count; key += kWidth) {
      const T* from[kWidth];
      for (int i = 0; i < kWidth; ++i) from[i] = keys[key + i < count ? key + i : count - 1] + offset;
      for (int row = 0; row < rows; ++row) {
        Floats sums[kWidth] = {};
        for (int element = 0, unit = 0; unit < units; element += kElementsAtOnce, unit += kWidth) {
          next.step();
          const Unit* query = queries + row * units + unit;
          const int left = head_dim - element;
          if (left >= kElementsAtOnce) {
#pragma GCC unroll 16
            for (int i = 0; i < kWidth; ++i)
              sums[i] = Units::multiply_add_vectors(sums[i], query, Units::load_units(from[i] + element, kElementsAtOnce));
          } else {
            for (int i = 0; i < kWidth; ++i)
              sums[i] = Units::multiply_add_vectors(sums[i], query, Units::load_units(from[i] + element, left));
          }
        }
        store(scores + row * kBlockKeys + key, sums_of_lanes(sums));
      }
    }
  }

  // output[rows][padded head_dim] = factors[rows] * output + weights[rows][kBlockKeys] times values, in the order of `put_in_order`.
  static void add_values(const Unit* weights, int rows, const T* const* values, int64_t offset, int count, int head_dim,
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
  static RADIXRT_INLINE void add_vector(const Unit* weights, const T* const* values, int64_t offset, int count, int element,
                                        int head_dim, const float* factors, float* output, int wide, FarPrefetcher& next) {
    constexpr int kVectors = Units::kElements;
    const int left = head_dim - element < kElementsAtOnce ? head_dim - element : kElementsAtOnce;
    Floats sums[rows][kVectors];
#pragma GCC unroll 4
    for (int row = 0; row < rows; ++row)
      for (int i = 0; i < kVectors; ++i)
        sums[row][i] = factors[row] * load(output + row * wide + element + i * kWidth);
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
          sums[row][i] = Units::multiply_add(sums[row][i], weights + row * kBlockKeys + key / Units::kElements,
                                             reinterpret_cast<const Unit*>(&loaded[i]));
    }
#pragma GCC unroll 4
    for (int row = 0; row < rows; ++row)
      for (int i = 0; i < kVectors; ++i) store(output + row * wide + element + i * kWidth, sums[row][i]);
  }
};

}  // namespace radixrt::RADIXRT_ISA
