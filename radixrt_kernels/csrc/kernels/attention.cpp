// Attention by blocks of keys with an online softmax (Dao et al., 2022, "FlashAttention"); compiled once for each instruction set.
//
// The rows of a task are its queries times the heads that share a KV head, so that keys and values are loaded and packed once for
// all of them. Scores are kept times log2 e: 2^x is what a processor computes.
#include "kernels/attention.hpp"

#include "isa.hpp"
#include "kernels/tile_product.hpp"
#include "simd.hpp"

namespace radixrt {
namespace RADIXRT_ISA {
namespace {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kMinusInfinity = -__builtin_inff();

// Memory of one thread for one task. Queries, keys, values and weights are units of 4 bytes or less.
struct Scratch {
  void* queries;  // [rows][padded head_dim]
  void* keys;     // [head_dim][kBlockKeys]
  void* values;   // [kBlockKeys][padded head_dim]
  void* weights;  // [rows][kBlockKeys]
  float* scores;  // [rows][kBlockKeys]
  float* output;  // [rows][padded head_dim], not divided by the sums yet
  float* largest;  // [rows]
  float* sums;     // [rows]
  float* factors;  // [rows] by which a block shrinks what came before it
};

int padded(int head_dim) { return rounded_up(head_dim, kWidth); }

// Lays the arrays out from `memory` on; returns their bytes.
int64_t lay_out(const AttentionLayer& layer, char* memory, Scratch* scratch) {
  int64_t rows = rows_at_most(layer.heads_per_kv_head), wide = padded(layer.head_dim);
  int64_t bytes = 0;
  auto take = [&](int64_t elements) {
    char* place = memory + bytes;
    bytes += (4 * elements + 63) / 64 * 64;
    return place;
  };
  Scratch s;
  s.queries = take(rows * wide);
  s.keys = take(wide * kBlockKeys);
  s.values = take(kBlockKeys * wide);
  s.weights = take(rows * kBlockKeys);
  s.scores = reinterpret_cast<float*>(take(rows * kBlockKeys));
  s.output = reinterpret_cast<float*>(take(rows * wide));
  s.largest = reinterpret_cast<float*>(take(rows));
  s.sums = reinterpret_cast<float*>(take(rows));
  s.factors = reinterpret_cast<float*>(take(rows));
  if (scratch) *scratch = s;
  return bytes;
}

int64_t scratch_bytes(const AttentionLayer& layer) { return lay_out(layer, nullptr, nullptr); }

// Where the rows of a block's keys and values begin.
template <class T>
struct BlockRows {
  const T* rows[2 * kBlockKeys];  // of the keys, then of the values
  int count;

  const T* const* keys() const { return rows; }
  const T* const* values() const { return rows + count; }

  // The block that begins at `first_key`; empty behind the task's last one.
  void find(const AttentionTensors& tensors, const AttentionTask& task, int64_t first_key) {
    int64_t left = task.end_key - first_key;
    count = left > kBlockKeys ? kBlockKeys : left < 0 ? 0 : int(left);
    auto all_keys = static_cast<const T*>(tensors.key_cache) + task.kv_head * tensors.key_head_stride;
    auto all_values = static_cast<const T*>(tensors.value_cache) + task.kv_head * tensors.value_head_stride;
    int64_t page = first_key / tensors.page_size, offset = first_key % tensors.page_size;
    for (int i = 0; i < count; ++i) {
      int64_t id = task.pages[page];
      rows[i] = all_keys + id * tensors.key_page_stride + offset * tensors.key_token_stride;
      rows[count + i] = all_values + id * tensors.value_page_stride + offset * tensors.value_token_stride;
      if (++offset == tensors.page_size) {
        offset = 0;
        ++page;
      }
    }
  }

  Prefetcher prefetcher(int head_dim) const {
    auto first = reinterpret_cast<const char* const*>(rows);
    return {first, first + 2 * count, head_dim * int(sizeof(T))};
  }
};

// Which keys of a block a query sees: begin..end-1 of 0..kBlockKeys-1.
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

// Scores as they come from the product, scaled, capped and times log2 e.
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

// One row of the online softmax: scores become weights 2^(score - largest), what is invisible becomes 0.
template <class Units>
RADIXRT_INLINE void softmax_row(float* scores, int columns, Visible seen, ScoreScale scale, typename Units::Unit* weights,
                                float& largest_so_far, float& sum_so_far, float& factor) {
  Floats most = splat(kMinusInfinity);
  const bool all = seen.begin == 0 && seen.end == columns;
  for (int i = 0; i < columns; i += kWidth) {
    Floats x = scale(load(scores + i));
    if (!all) {
      Ints lane = lane_numbers() + i;
      x = (lane >= seen.begin) & (lane < seen.end) ? x : splat(kMinusInfinity);
    }
    store(scores + i, x);
    most = maximum(most, x);
  }
  float before = largest_so_far, now = largest(most);
  now = now > before ? now : before;
  float reference = now == kMinusInfinity ? 0.0f : now;  // nothing seen yet: every weight is 2^-infinity
  factor = before == kMinusInfinity ? 0.0f : exp2(splat(before - reference))[0];
  Floats total = splat(0.0f);
  for (int i = 0; i < columns; i += kWidth) {
    Floats weight = exp2(load(scores + i) - reference);
    total = total + weight;
    Units::pack_weights(weight, i, weights);
  }
  largest_so_far = now;
  sum_so_far = sum_so_far * factor + sum(total);
}

template <class T, class Units>
struct Attention {
  using Unit = typename Units::Unit;

  static void pack_queries(const AttentionLayer& layer, const AttentionTensors& tensors, const AttentionTask& task, Unit* to) {
    auto query = static_cast<const T*>(tensors.query);
    int group = layer.heads_per_kv_head, stride = padded(layer.head_dim);
    for (int token = 0; token < task.num_tokens; ++token)
      for (int head = 0; head < group; ++head)
        Units::pack_row(query + (task.first_token + token) * tensors.query_token_stride +
                            (task.kv_head * group + head) * tensors.query_head_stride,
                        layer.head_dim, to + (token * group + head) * stride);
  }

  static void attend(const AttentionLayer& layer, const AttentionTensors& tensors, const AttentionTask& task,
                     const int64_t* positions, const PartialRows& partials, void* memory) {
    Scratch s;
    lay_out(layer, static_cast<char*>(memory), &s);
    auto queries = static_cast<Unit*>(s.queries), keys = static_cast<Unit*>(s.keys), values = static_cast<Unit*>(s.values),
         weights = static_cast<Unit*>(s.weights);
    const int group = layer.heads_per_kv_head, rows = task.num_tokens * group, wide = padded(layer.head_dim);
    const int depth = (layer.head_dim + Units::kElements - 1) / Units::kElements;
    const ScoreScale scale(layer);
    pack_queries(layer, tensors, task, queries);
    memset(s.output, 0, sizeof(float) * rows * wide);
    for (int row = 0; row < rows; ++row) {
      s.largest[row] = kMinusInfinity;
      s.sums[row] = 0.0f;
    }

    BlockRows<T> blocks[2];
    int which = 0;
    blocks[0].find(tensors, task, task.first_key);
    for (int64_t first_key = task.first_key; first_key < task.end_key; first_key += kBlockKeys, which ^= 1) {
      const auto& block = blocks[which];
      blocks[which ^ 1].find(tensors, task, first_key + kBlockKeys);
      Prefetcher next = blocks[which ^ 1].prefetcher(layer.head_dim);

      const int columns = rounded_up(block.count, kWidth);
      pack_keys<Units>(block.keys(), block.count, layer.head_dim, keys, next);
      multiply<Units>(queries, wide, rows, keys, kBlockKeys, columns, depth, nullptr, s.scores, kBlockKeys, next);
      for (int token = 0, row = 0; token < task.num_tokens; ++token) {
        Visible seen = visible(positions[task.first_token + token], layer, first_key, block.count);
        for (int head = 0; head < group; ++head, ++row) {
          next.steps(2);
          softmax_row<Units>(s.scores + row * kBlockKeys, columns, seen, scale, weights + row * kBlockKeys, s.largest[row],
                             s.sums[row], s.factors[row]);
        }
      }
      Units::pack_values(block.values(), block.count, layer.head_dim, wide, values, next);
      multiply<Units>(weights, kBlockKeys, rows, values, wide, wide, (block.count + Units::kElements - 1) / Units::kElements,
                      s.factors, s.output, wide, next);
    }
    leave(layer, tensors, task, s, partials);
  }

  // Results go where they belong, or aside to be merged.
  static void leave(const AttentionLayer& layer, const AttentionTensors& tensors, const AttentionTask& task, const Scratch& s,
                    const PartialRows& partials) {
    const int group = layer.heads_per_kv_head, rows = task.num_tokens * group, wide = padded(layer.head_dim);
    for (int row = 0; row < rows; ++row) {
      const float* from = s.output + row * wide;
      if (task.partial_row < 0) {
        T* to = output_row(layer, tensors, task.first_token + row / group, task.kv_head, row % group);
        write(from, 1.0f / s.sums[row], layer.head_dim, to);
      } else {
        int64_t to = task.partial_row + row;
        memcpy(partials.values + to * layer.head_dim, from, sizeof(float) * layer.head_dim);
        partials.largest[to] = s.largest[row];
        partials.sums[to] = s.sums[row];
      }
    }
  }

  static T* output_row(const AttentionLayer& layer, const AttentionTensors& tensors, int64_t token, int kv_head, int head) {
    int64_t heads = int64_t{layer.num_kv_heads} * layer.heads_per_kv_head;
    int64_t row = token * heads + kv_head * layer.heads_per_kv_head + head;
    return static_cast<T*>(tensors.output) + row * layer.head_dim;
  }

  static void write(const float* from, float factor, int head_dim, T* to) {
    int i = 0;
    for (; i + kWidth <= head_dim; i += kWidth) store(to + i, factor * load(from + i));
    if (i < head_dim) store_first(to + i, factor * load_first(from + i, head_dim - i), head_dim - i);
  }

  // Weights are relative to each part's largest score; made relative to the largest of all, they add up (log-sum-exp).
  static void merge(const AttentionLayer& layer, const AttentionTensors& tensors, const MergeTask& task,
                    const PartialRows& partials) {
    alignas(64) float merged[kMergedColumns];
    for (int head = 0; head < layer.heads_per_kv_head; ++head) {
      float most = kMinusInfinity;
      for (int i = 0; i < task.num_partials; ++i) {
        float part = partials.largest[task.partial_rows[i] + head];
        most = part > most ? part : most;
      }
      T* to = output_row(layer, tensors, task.token, task.kv_head, head);
      for (int column = 0; column < layer.head_dim; column += kMergedColumns) {
        int columns = layer.head_dim - column < kMergedColumns ? layer.head_dim - column : kMergedColumns;
        float total = 0.0f;
        memset(merged, 0, sizeof merged);
        for (int i = 0; i < task.num_partials; ++i) {
          int64_t row = task.partial_rows[i] + head;
          if (partials.largest[row] == kMinusInfinity) continue;
          float factor = exp2(splat(partials.largest[row] - most))[0];
          total += factor * partials.sums[row];
          add_scaled(partials.values + row * layer.head_dim + column, factor, columns, merged);
        }
        write(merged, 1.0f / total, columns, to + column);
      }
    }
  }

  static constexpr int kMergedColumns = 256;

  static void add_scaled(const float* from, float factor, int columns, float* to) {
    int i = 0;
    for (; i + kWidth <= columns; i += kWidth) store(to + i, load(to + i) + factor * load(from + i));
    for (; i < columns; ++i) to[i] += factor * from[i];
  }
};

template <class T, class Units>
constexpr AttentionKernels::Of kKernelsOf{Attention<T, Units>::attend, Attention<T, Units>::merge};

}  // namespace
}  // namespace RADIXRT_ISA

template <>
const AttentionKernels& table_of<AttentionKernels, Isa::RADIXRT_ISA>() {
  using namespace RADIXRT_ISA;
#if defined(__AVX512BF16__)
  using BFloat16Units = PairUnits;
#else
  using BFloat16Units = FloatUnits<BFloat16>;
#endif
  static constexpr AttentionKernels table{
      kKernelsOf<float, FloatUnits<float>>,
      kKernelsOf<BFloat16, BFloat16Units>,
      kKernelsOf<Float16, FloatUnits<Float16>>,
      scratch_bytes,
  };
  return table;
}

}  // namespace radixrt
