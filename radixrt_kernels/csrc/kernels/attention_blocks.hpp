// Blocks of keys: addresses of their rows, visibility, and the online softmax.
#pragma once

#include "kernels/attention.hpp"
#include "kernels/tile_product.hpp"
#include "simd.hpp"

namespace radixrt::RADIXRT_ISA {

inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kMinusInfinity = -__builtin_inff();

// Addresses of the rows of a block's keys and values, for the task's first KV head. T: as they are stored.
template <class T>
struct BlockRows {
  const T* rows[2 * kBlockKeys];  // rows of the keys, then of the values
  const T* pages[2 * kBlockKeys];  // the first row of a key and of a value in each page
  int count, page_count;

  const T* const* keys() const { return rows; }
  const T* const* values() const { return rows + count; }

  // The block from `first_key` on; empty after the task's last key.
  void find(const AttentionTensors& tensors, const AttentionTask& task, int64_t first_key) {
    int64_t left = task.end_key - first_key;
    count = left > kBlockKeys ? kBlockKeys : left < 0 ? 0 : int(left);
    auto all_keys = static_cast<const T*>(tensors.key_cache) + task.kv_head * tensors.key_head_stride;
    auto all_values = static_cast<const T*>(tensors.value_cache) + task.kv_head * tensors.value_head_stride;
    int64_t page = first_key / tensors.page_size, offset = first_key % tensors.page_size;
    page_count = 0;
    for (int i = 0; i < count; ++page, offset = 0) {
      const int64_t id = task.pages[page];
      const T* key = all_keys + id * tensors.key_page_stride + offset * tensors.key_token_stride;
      const T* value = all_values + id * tensors.value_page_stride + offset * tensors.value_token_stride;
      pages[page_count++] = key;
      pages[page_count++] = value;
      for (; i < count && offset < tensors.page_size; ++i, ++offset, key += tensors.key_token_stride, value += tensors.value_token_stride) {
        rows[i] = key;
        rows[count + i] = value;
      }
    }
  }

  // Of whole pages, whose tokens have no gaps between them.
  Prefetcher page_prefetcher(int64_t elements) const {
    auto first = reinterpret_cast<const char* const*>(pages);
    return {first, first + page_count, int(elements * sizeof(T))};
  }

  // `elements`: per row. `latent`: the rows of the values are those of the keys.
  Prefetcher prefetcher(int elements, bool latent = false) const {
    auto first = reinterpret_cast<const char* const*>(rows);
    return {first, first + (latent ? 1 : 2) * count, elements * int(sizeof(T))};
  }
};

// Calls `body(first_key, block, next_block)` for each block of a task's keys; the next block is passed for prefetching.
template <class T, class Body>
RADIXRT_INLINE void for_each_block(const AttentionTensors& tensors, const AttentionTask& task, Body&& body) {
  BlockRows<T> blocks[2];
  int which = 0;
  blocks[0].find(tensors, task, task.first_key);
  for (int64_t first_key = task.first_key; first_key < task.end_key; first_key += kBlockKeys, which ^= 1) {
    blocks[which ^ 1].find(tensors, task, first_key + kBlockKeys);
    body(first_key, blocks[which], blocks[which ^ 1]);
  }
}

// Cuts of a task's keys.
RADIXRT_INLINE int64_t cuts_of(const AttentionTensors& tensors, const AttentionTask& task) {
  return (task.end_key - 1) / tensors.keys_per_cut - task.first_key / tensors.keys_per_cut + 1;
}

// Weighted values of some keys, one row for each query and head, relative to the row's largest score.
struct RowSums {
  float* values;  // [rows][width]
  float* largest;
  float* sums;

  void clear(int rows, int width) const {
    memset(values, 0, sizeof(float) * rows * width);
    for (int row = 0; row < rows; ++row) {
      largest[row] = kMinusInfinity;
      sums[row] = 0.0f;
    }
  }
};

// Folds later keys into earlier ones: the part with the smaller maximum is rescaled to the other's (log-sum-exp). Every cut passes here, in
// a task or in a merge, so that all are rounded alike.
struct Fold {
  Ints later_is_larger;
  Floats factor;  // of the part with the smaller maximum

  // One row in each lane.
  RADIXRT_INLINE Fold(Floats& largest, Floats& sum, Floats later_largest, Floats later_sum) {
    later_is_larger = later_largest > largest;
    Floats most = later_is_larger ? later_largest : largest, least = later_is_larger ? largest : later_largest;
    factor = exp2(most == kMinusInfinity ? most : least - most);  // 0 if no key is visible
    sum = factor * (later_is_larger ? sum : later_sum) + (later_is_larger ? later_sum : sum);
    largest = most;
  }
};

// The factor of a row's values once all keys are in: the inverse of the weights' sum. `sink`: a score without a value, or null. It is the last
// part of the fold, so it changes nothing before it.
RADIXRT_INLINE float factor_of_values(float largest, float sum, const float* sink) {
  if (sink == nullptr) return 1.0f / sum;
  Floats most = splat(largest), all = splat(sum);
  const Fold fold(most, all, splat(*sink * kLog2E), splat(1.0f));
  return (fold.later_is_larger[0] ? fold.factor[0] : 1.0f) / all[0];
}

// values[width] of one row; `width` is a multiple of kWidth.
RADIXRT_INLINE void fold_values(float* values, const float* later, int width, bool later_is_larger, float factor) {
  const float *smaller = later_is_larger ? values : later, *larger = later_is_larger ? later : values;
  for (int i = 0; i < width; i += kWidth) store(values + i, factor * load(smaller + i) + load(larger + i));
}

// Visible keys of a block for a query: begin..end-1 of 0..kBlockKeys-1.
struct Visible {
  int begin, end;
};

RADIXRT_INLINE Visible visible(int64_t position, const AttentionLayer& layer, int64_t first_key, int count) {
  int64_t begin = position - layer.window + 1 - first_key, end = position + 1 - first_key;
  begin = begin < 0 ? 0 : begin > count ? count : begin;
  end = end < 0 ? 0 : end > count ? count : end;
  return {int(begin), int(end)};
}

RADIXRT_INLINE Ints lane_numbers() {
  Ints lanes;
  for (int i = 0; i < kWidth; ++i) lanes[i] = i;
  return lanes;
}

// Scales and caps the scores of the product, and multiplies them by log2 e.
struct ScoreScale {
  float factor;
  float soft_cap;

  explicit ScoreScale(const AttentionLayer& layer)
      : factor(layer.soft_cap ? layer.scale / layer.soft_cap : layer.scale * kLog2E), soft_cap(layer.soft_cap * kLog2E) {}

  static RADIXRT_INLINE Floats capped(Floats x, float cap) {
    return cap * (1.0f - 2.0f / (1.0f + exp2(2.0f * kLog2E * x)));  // cap * tanh(x)
  }
  Floats operator()(Floats x) const { return soft_cap ? capped(x * factor, soft_cap) : x * factor; }
};

// The scales of a block's coded keys and values; keys that are not there have 0.
struct BlockScales {
  alignas(64) float keys[kBlockKeys], values[kBlockKeys];
  alignas(64) float others[kBlockKeys];  // of the features of a latent that are not its value

  void read(const BlockRows<int8_t>& block, int64_t key_offset, int64_t value_offset) {
    read_column(block.keys(), key_offset, block.count, keys);
    read_column(block.values(), value_offset, block.count, values);
  }

  // `block_size`: that of their Hadamard matrix, by which the products are too large.
  void read_other(const BlockRows<int8_t>& block, int64_t offset, int block_size) {
    read_column(block.keys(), offset, block.count, others);
    for (int i = 0; i < kBlockKeys; i += kWidth) store(others + i, load(others + i) * (1.0f / block_size));
  }

 private:
  static void read_column(const int8_t* const* rows, int64_t offset, int count, float* to) {
    BFloat16 scales[kBlockKeys] = {};
    for (int i = 0; i < count; ++i) memcpy(scales + i, rows[i] + offset, sizeof *scales);
    for (int i = 0; i < kBlockKeys; i += kWidth) store(to + i, load(scales + i));
  }
};

// Multiplies each block of a head by a Hadamard matrix (Sylvester's).
static void rotate_head(float* head, int head_dim) {
  const int block = hadamard_block(head_dim);
  for (int step = 1; step < block; step *= 2)
    for (int first = 0; first < head_dim; first += 2 * step)
      for (int i = first; i < first + step; ++i) {
        float a = head[i], b = head[i + step];
        head[i] = a + b;
        head[i + step] = a - b;
      }
}

// One row of the online softmax: scores become weights 2^(score - largest), invisible keys get weight 0. `score_of(i)`: the products from key
// i on, of which `scores` may be the memory. `value_scales`: null, or those by which coded values are multiplied. `update_sums` completes
// `change` and `total_weight`.
template <class Units, class ScoreOf>
RADIXRT_INLINE void softmax_row(ScoreOf&& score_of, float* scores, int columns, Visible seen, ScoreScale scale, const float* value_scales,
                                typename Units::Unit* weights, float& largest_so_far, float& change, float& total_weight) {
  Floats most = splat(kMinusInfinity);
  const bool all = seen.begin == 0 && seen.end == columns;
  for (int i = 0; i < columns; i += kWidth) {
    Floats x = scale(score_of(i));
    if (!all) {
      Ints lane = lane_numbers() + i;
      x = (lane >= seen.begin) & (lane < seen.end) ? x : splat(kMinusInfinity);
    }
    store(scores + i, x);
    most = maximum(most, x);
  }
  float before = largest_so_far, now = largest(most);
  now = now > before ? now : before;
  float reference = now == kMinusInfinity ? 0.0f : now;  // no visible key yet: every weight is 2^-infinity
  change = before - reference;
  Floats total = splat(0.0f);
  for (int i = 0; i < columns; i += kWidth) {
    Floats weight = exp2(load(scores + i) - reference);
    total = total + weight;
    Units::pack_weights(value_scales ? weight * load(value_scales + i) : weight, i, weights);
  }
  largest_so_far = now;
  total_weight = sum(total);
}

// After `softmax_row` of some rows: changes become factors, and the sums include the totals. The arrays have whole vectors from the first row on.
RADIXRT_INLINE void update_sums(int rows, float* changes, const float* totals, float* sums) {
  for (int row = 0; row < rows; row += kWidth) {
    Floats factor = exp2(load(changes + row)), before = load(sums + row);
    store(changes + row, factor);
    store(sums + row, lane_numbers() + row < rows ? before * factor + load(totals + row) : before);
  }
}

}  // namespace radixrt::RADIXRT_ISA
