// Attention by blocks of keys with an online softmax (Dao et al., 2022, "FlashAttention"); compiled once for each instruction set.
//
// The rows of a KV head are the task's queries times the heads that share it. Many rows: keys and values are loaded and packed once
// for all rows. Few rows, as in a decode: packing would cost more than the products and memory is the limit, so a task has several
// KV heads with adjacent keys, and does not pack. Scores are scaled by log2 e, because processors compute 2^x.
#include "kernels/attention.hpp"

#include "isa.hpp"
#include "kernels/attention_blocks.hpp"
#include "kernels/byte_blocks.hpp"
#include "kernels/few_rows.hpp"

namespace radixrt {
namespace RADIXRT_ISA {
namespace {

// Scratch memory of one thread for one task. Queries, keys, values and weights are units of 4 bytes or less.
struct Scratch {
  void* queries;  // [rows][padded head_dim]
  void* keys;     // [head_dim][kBlockKeys]
  void* values;   // [kBlockKeys][padded value_dim]
  void* weights;  // [rows][kBlockKeys]
  float* scores;  // [rows][kBlockKeys]
  float* other_scores;  // the same, of the features of a coded latent that are not its value
  RowSums cut;     // of the cut that is being computed
  RowSums before;  // of the cuts before it
  float* factors;  // [rows] by which a block scales the sums of its cut
  float* totals;   // [rows] of a block's weights
  void* query_scales;  // [rows]
  float* products;     // [2 * kRowsOfBytes][head_dim or kBlockKeys]
};

constexpr int kRowsOfBytes = 8;  // at once

int padded(int head_dim) { return rounded_up(head_dim, kWidth); }

// Assigns the arrays from `memory` on. Returns their size in bytes.
int64_t lay_out(const AttentionLayer& layer, char* memory, Scratch* scratch) {
  int64_t rows = rows_at_most(layer.heads_per_kv_head), wide = padded(layer.head_dim), value_wide = padded(layer.value_dim);
  int64_t bytes = 0;
  auto take = [&](int64_t elements) {
    char* place = memory + bytes;
    bytes += (4 * elements + 63) / 64 * 64;
    return place;
  };
  Scratch s;
  s.queries = take(rows * wide);
  s.keys = take(wide * kBlockKeys);
  s.values = take(kBlockKeys * value_wide);
  s.weights = take(rows * kBlockKeys);
  s.scores = reinterpret_cast<float*>(take(rows * kBlockKeys));
  s.other_scores = reinterpret_cast<float*>(take(layer.latent ? rows * kBlockKeys : 0));
  for (RowSums* sums : {&s.cut, &s.before}) {
    sums->values = reinterpret_cast<float*>(take(rows * rounded_up(layer.value_dim, 2 * kWidth)));
    sums->largest = reinterpret_cast<float*>(take(rows));
    sums->sums = reinterpret_cast<float*>(take(rows + kWidth));
  }
  s.factors = reinterpret_cast<float*>(take(rows + kWidth));
  s.totals = reinterpret_cast<float*>(take(rows + kWidth));
  s.query_scales = take(2 * rows);
  s.products = reinterpret_cast<float*>(take(2 * kRowsOfBytes * (wide > kBlockKeys ? wide : kBlockKeys)));
  if (scratch) *scratch = s;
  return bytes;
}

int64_t scratch_bytes(const AttentionLayer& layer) { return lay_out(layer, nullptr, nullptr); }

// Queries and results are T; keys and values are stored as S: T, or int8_t for coded heads.
template <class T, class Units, class S>
struct Attention {
  using Unit = typename Units::Unit;
  using Few = FewRows<S, Units>;
  static constexpr bool kCoded = sizeof(S) == 1;
#if defined(RADIXRT_HAS_BYTE_BLOCKS)
  static constexpr bool kInBytes = kCoded && Units::kElements == 2;
#else
  static constexpr bool kInBytes = false;
#endif

  // Rows ordered by KV head; within it, the heads of a query are adjacent.
  template <class Body>
  static void for_each_query(const AttentionLayer& layer, const AttentionTensors& tensors, const AttentionTask& task, Body&& body) {
    auto query = static_cast<const T*>(tensors.query);
    const int group = layer.heads_per_kv_head;
    int row = 0;
    for (int kv_head = task.kv_head; kv_head < task.kv_head + task.num_kv_heads; ++kv_head)
      for (int token = 0; token < task.num_tokens; ++token)
        for (int head = 0; head < group; ++head, ++row)
          body(row, query + (task.first_token + token) * tensors.query_token_stride + (kv_head * group + head) * tensors.query_head_stride);
  }

  static void rotate(const T* query, int head_dim, float* to) {
    convert(query, head_dim, to);
    rotate_head(to, head_dim);
  }

  static void pack_queries(const AttentionLayer& layer, const AttentionTensors& tensors, const AttentionTask& task, int stride,
                           Unit* to) {
    for_each_query(layer, tensors, task, [&](int row, const T* from) {
      if constexpr (kCoded) {
        float rotated[kMostCoded];
        T rounded[kMostCoded];
        const int first = layer.latent ? layer.value_dim : 0;  // values are not rotated
        convert(from, first, rotated);
        rotate(from + first, layer.head_dim - first, rotated + first);
        convert(rotated, layer.head_dim, rounded);
        Units::pack_row(rounded, layer.head_dim, to + row * stride);
      } else {
        Units::pack_row(from, layer.head_dim, to + row * stride);
      }
    });
  }

  template <class From, class To>
  static void convert(const From* from, int count, To* to) {
    int i = 0;
    for (; i + kWidth <= count; i += kWidth) store(to + i, load(from + i));
    if (i < count) store_first(to + i, load_first(from + i, count - i), count - i);
  }

  // Infinities and NaN make the scale NaN.
  static void code(const void* head, int head_dim, bool rotated, int8_t* to) {
    alignas(64) float values[kMostCoded];
    convert(static_cast<const T*>(head), head_dim, values);
    if (rotated) rotate_head(values, head_dim);
    float most = 0, odd = 0;
    for (int i = 0; i < head_dim; ++i) {
      float magnitude = values[i] < 0 ? -values[i] : values[i];
      most = magnitude > most ? magnitude : most;
      odd += values[i] - values[i];
    }
    float scale = most / 127 + odd;
    uint32_t bits;
    memcpy(&bits, &scale, sizeof bits);
    bits = (bits + 0xffff) & 0xffff0000u;  // rounded up, so that no code is above 127
    memcpy(&scale, &bits, sizeof bits);
    const float inverse = scale > 0 ? 1 / scale : 0;
    for (int i = 0; i < head_dim; ++i) {
      const float shift = 12582912.0f;  // 1.5 * 2^23: after the addition, the low bits are the nearest integer
      float shifted = values[i] * inverse + shift;
      uint32_t low;
      memcpy(&low, &shifted, sizeof low);
      to[i] = static_cast<int8_t>(low);
    }
    const auto upper = static_cast<uint16_t>(bits >> 16);
    memcpy(to + head_dim, &upper, sizeof upper);
  }

  static void begin(const AttentionTensors& tensors, const AttentionTask& task, const Scratch& s, int rows, int width) {
    s.cut.clear(rows, width);
    if (cuts_of(tensors, task) > 1) s.before.clear(rows, width);
  }

  static void attend(const AttentionLayer& layer, const AttentionTensors& tensors, const AttentionTask& task,
                     const int64_t* positions, const PartialRows& partials, void* memory) {
#if defined(RADIXRT_HAS_BYTE_BLOCKS)
    if constexpr (kInBytes)
      if (layer.heads_per_kv_head > kFewRows && layer.value_dim == layer.head_dim) return attend_bytes(layer, tensors, task, positions, partials, memory);
#endif
    if (task.num_tokens * layer.heads_per_kv_head <= kFewRows && !(kCoded && layer.latent))
      attend_few(layer, tensors, task, positions, partials, memory);
    else
      attend_many(layer, tensors, task, positions, partials, memory);
  }

  // Of a key, or of a value if that is larger.
  static int stored_elements(const AttentionLayer& layer) {
    const int features = layer.head_dim > layer.value_dim ? layer.head_dim : layer.value_dim;
    return features + (kCoded ? (1 + layer.latent) * kScaleBytes : 0);
  }

#if defined(RADIXRT_HAS_BYTE_BLOCKS)
  // Any number of KV heads over coded heads, without decoding them.
  static void attend_bytes(const AttentionLayer& layer, const AttentionTensors& tensors, const AttentionTask& task,
                           const int64_t* positions, const PartialRows& partials, void* memory) {
    Scratch s;
    lay_out(layer, static_cast<char*>(memory), &s);
    auto queries = static_cast<uint32_t*>(s.queries), keys = static_cast<uint32_t*>(s.keys), values = static_cast<uint32_t*>(s.values),
         weights = static_cast<uint32_t*>(s.weights);
    auto query_scales = static_cast<QueryScale*>(s.query_scales);
    const int group = layer.heads_per_kv_head, rows = task.num_tokens * group, heads = task.num_kv_heads, wide = padded(layer.head_dim);
    const int units = ByteBlocks::key_units(layer.head_dim), value_width = ByteBlocks::value_width(layer.head_dim);
    const ScoreScale scale(layer);
    for_each_query(layer, tensors, task, [&](int row, const T* from) {
      float rotated[kMostCoded];
      rotate(from, layer.head_dim, rotated);
      query_scales[row].pack(rotated, layer.head_dim, units, reinterpret_cast<int8_t*>(queries + 2 * row * units));
    });
    begin(tensors, task, s, heads * rows, wide);
    const int row_elements = static_cast<int>((heads - 1) * tensors.key_head_stride) + stored_elements(layer);
    const bool whole = row_elements == tensors.key_token_stride && row_elements == tensors.value_token_stride;
    const int steps_ahead = heads * (2 * rows / kRowsAtOnce + 1) * (units + ByteBlocks::kWeightUnits * (value_width / 64));

    for_each_block<S>(tensors, task, [&](int64_t first_key, const BlockRows<S>& block, const BlockRows<S>& next_block) {
      end_cut_before<false>(first_key, tensors, task, s, heads * rows, wide, partials);
      FarPrefetcher next(whole ? next_block.page_prefetcher(row_elements * tensors.page_size) : next_block.prefetcher(row_elements), steps_ahead);
      const int columns = rounded_up(block.count, kWidth), depth = (block.count + kBytes - 1) / kBytes;
      for (int head = 0; head < heads; ++head) {
        const int64_t key_offset = head * tensors.key_head_stride, value_offset = head * tensors.value_head_stride;
        BlockScales scales;
        scales.read(block, key_offset + layer.head_dim, value_offset + layer.head_dim);
        pack_keys<KeyBytes>(block.keys(), key_offset, block.count, layer.head_dim, keys, next);
        ByteBlocks::pack_values(block.values(), value_offset, block.count, layer.head_dim, values);
        WeightSteps steps;
        int64_t token = -1;
        Visible seen{};
        for (int first = 0; first < rows; first += kRowsOfBytes) {
          const int count = rows - first < kRowsOfBytes ? rows - first : kRowsOfBytes, at = head * rows + first;
          float step_of[kRowsOfBytes];
          multiply<KeyBytes>(queries + 2 * at * units, units, 2 * count, keys, kBlockKeys, columns, units, nullptr, s.products, kBlockKeys, next);
          for (int row = 0; row < count; ++row) {
            if ((first + row) / group != token) {
              token = (first + row) / group;
              seen = visible(positions[task.first_token + token], layer, first_key, block.count);
              steps.set(scales.values, seen);
            }
            step_of[row] = steps.step;
            const QueryScale& query = query_scales[at + row];
            ScoreScale of_query = scale;
            of_query.factor *= query.scale;
            float* products = s.products + 2 * row * kBlockKeys;
            softmax_row<ValueBytes>([&](int i) { return query.scores(products + i) * load(scales.keys + i); }, products, columns, seen, of_query,
                                    steps.of_keys, weights + 2 * row * ByteBlocks::kWeightUnits, s.cut.largest[at + row], s.factors[row],
                                    s.totals[row]);
          }
          update_sums(count, s.factors, s.totals, s.cut.sums + at);
          multiply<ValueBytes>(weights, ByteBlocks::kWeightUnits, 2 * count, values, value_width, wide, depth, nullptr, s.products, wide, next);
          ByteBlocks::add_products(s.products, count, wide, s.factors, step_of, s.cut.values + at * wide);
        }
      }
    });
    leave<false>(layer, tensors, task, s, wide, partials);
  }
#endif

  // Any number of KV heads, each with few rows.
  static void attend_few(const AttentionLayer& layer, const AttentionTensors& tensors, const AttentionTask& task,
                         const int64_t* positions, const PartialRows& partials, void* memory) {
    Scratch s;
    lay_out(layer, static_cast<char*>(memory), &s);
    auto queries = static_cast<Unit*>(s.queries), weights = static_cast<Unit*>(s.weights);
    const int group = layer.heads_per_kv_head, rows = task.num_tokens * group, heads = task.num_kv_heads;
    const int units = rounded_up(layer.head_dim, Few::kElementsAtOnce) / Units::kElements, wide = rounded_up(layer.value_dim, Few::kElementsAtOnce);
    const ScoreScale scale(layer);
    pack_queries(layer, tensors, task, units, queries);
    begin(tensors, task, s, heads * rows, wide);

    for_each_block<S>(tensors, task, [&](int64_t first_key, const BlockRows<S>& block, const BlockRows<S>& next_block) {
      end_cut_before<true>(first_key, tensors, task, s, heads * rows, wide, partials);
      FarPrefetcher next(next_block.prefetcher((heads - 1) * tensors.key_head_stride + stored_elements(layer), layer.latent),
                         heads * Few::steps(rows, kBlockKeys, layer.head_dim));
      const int columns = rounded_up(block.count, kWidth);
      for (int head = 0; head < heads; ++head) {
        const int first_row = head * rows;
        [[maybe_unused]] BlockScales scales;
        if constexpr (kCoded)
          scales.read(block, head * tensors.key_head_stride + layer.head_dim, head * tensors.value_head_stride + layer.value_dim);
        Few::score(queries + first_row * units, rows, block.keys(), head * tensors.key_head_stride, block.count, layer.head_dim,
                   s.scores, next);
        for (int row = 0; row < rows; ++row) {
          Visible seen = visible(positions[task.first_token + row / group], layer, first_key, block.count);
          float* scores = s.scores + row * kBlockKeys;
          auto score_of = [&](int i) { return kCoded ? load(scores + i) * load(scales.keys + i) : load(scores + i); };
          softmax_row<Units>(score_of, scores, columns, seen, scale, kCoded ? scales.values : nullptr, weights + row * kBlockKeys,
                             s.cut.largest[first_row + row], s.factors[row], s.totals[row]);
        }
        update_sums(rows, s.factors, s.totals, s.cut.sums + first_row);
        Few::add_values(weights, rows, block.values(), head * tensors.value_head_stride, block.count, layer.value_dim, s.factors,
                        s.cut.values + first_row * wide, next);
      }
    });
    leave<true>(layer, tensors, task, s, wide, partials);
  }

  // One KV head.
  static void attend_many(const AttentionLayer& layer, const AttentionTensors& tensors, const AttentionTask& task,
                          const int64_t* positions, const PartialRows& partials, void* memory) {
    Scratch s;
    lay_out(layer, static_cast<char*>(memory), &s);
    auto queries = static_cast<Unit*>(s.queries), keys = static_cast<Unit*>(s.keys), values = static_cast<Unit*>(s.values),
         weights = static_cast<Unit*>(s.weights);
    const int group = layer.heads_per_kv_head, rows = task.num_tokens * group, query_wide = padded(layer.head_dim), wide = padded(layer.value_dim);
    const bool in_two = kCoded && layer.latent;  // a coded latent has a scale for its value, and one for its other features
    const int first_dim = in_two ? layer.value_dim : layer.head_dim, first_depth = units_of(first_dim);
    [[maybe_unused]] const int other_dim = layer.head_dim - first_dim, other_at = first_dim + kScaleBytes;
    const ScoreScale scale(layer);
    pack_queries(layer, tensors, task, query_wide, queries);
    begin(tensors, task, s, rows, wide);

    for_each_block<S>(tensors, task, [&](int64_t first_key, const BlockRows<S>& block, const BlockRows<S>& next_block) {
      end_cut_before<false>(first_key, tensors, task, s, rows, wide, partials);
      Prefetcher next = next_block.prefetcher(stored_elements(layer), layer.latent);
      [[maybe_unused]] BlockScales scales;
      const int columns = rounded_up(block.count, kWidth);
      pack_keys<Units>(block.keys(), 0, block.count, first_dim, keys, next);
      multiply<Units>(queries, query_wide, rows, keys, kBlockKeys, columns, first_depth, nullptr, s.scores, kBlockKeys, next);
      if constexpr (kCoded) {
        scales.read(block, first_dim, layer.value_dim);
        if (in_two) {
          Unit* other_keys = keys + first_depth * kBlockKeys;
          pack_keys<Units>(block.keys(), other_at, block.count, other_dim, other_keys, next);
          multiply<Units>(queries + first_depth, query_wide, rows, other_keys, kBlockKeys, columns, units_of(other_dim), nullptr,
                          s.other_scores, kBlockKeys, next);
          scales.read_other(block, other_at + other_dim, hadamard_block(other_dim));
        }
      }
      for (int token = 0, row = 0; token < task.num_tokens; ++token) {
        Visible seen = visible(positions[task.first_token + token], layer, first_key, block.count);
        for (int head = 0; head < group; ++head, ++row) {
          next.steps(2);
          float *scores = s.scores + row * kBlockKeys, *others = s.other_scores + row * kBlockKeys;
          auto score_of = [&](int i) {
            if constexpr (!kCoded) return load(scores + i);
            Floats score = load(scores + i) * load(scales.keys + i);
            return in_two ? score + load(others + i) * load(scales.others + i) : score;
          };
          softmax_row<Units>(score_of, scores, columns, seen, scale, kCoded ? scales.values : nullptr, weights + row * kBlockKeys,
                             s.cut.largest[row], s.factors[row], s.totals[row]);
        }
      }
      update_sums(rows, s.factors, s.totals, s.cut.sums);
      Units::pack_values(block.values(), block.count, layer.value_dim, wide, values, next);
      multiply<Units>(weights, kBlockKeys, rows, values, wide, wide, (block.count + Units::kElements - 1) / Units::kElements,
                      s.factors, s.cut.values, wide, next);
    });
    leave<false>(layer, tensors, task, s, wide, partials);
  }

  static int units_of(int features) { return (features + Units::kElements - 1) / Units::kElements; }

  // Ends the cut before `first_key`, if there is one: it is left for a merge, or folded into the cuts before it. `kInterleaved`: rows are in
  // the order of few rows.
  template <bool kInterleaved>
  static void end_cut_before(int64_t first_key, const AttentionTensors& tensors, const AttentionTask& task, const Scratch& s, int rows,
                             int width, const PartialRows& partials) {
    if (first_key == task.first_key || first_key % tensors.keys_per_cut) return;
    const int64_t cut = first_key / tensors.keys_per_cut - 1 - task.first_key / tensors.keys_per_cut;
    if (task.each_cut)
      leave_rows<kInterleaved>(s.cut, rows, width, task.partial_row + cut * rows, partials);
    else
      fold_cut(s, rows, width);
    s.cut.clear(rows, width);
  }

  static void fold_cut(const Scratch& s, int rows, int width) {
    for (int first = 0; first < rows; first += kWidth) {  // the arrays have whole vectors
      Floats largest = load(s.before.largest + first), sum = load(s.before.sums + first);
      const Fold fold(largest, sum, load(s.cut.largest + first), load(s.cut.sums + first));
      store(s.before.largest + first, largest);
      store(s.before.sums + first, sum);
      for (int row = first; row < rows && row < first + kWidth; ++row)
        fold_values(s.before.values + row * width, s.cut.values + row * width, width, fold.later_is_larger[row - first],
                    fold.factor[row - first]);
    }
  }

  template <bool kInterleaved>
  static void leave_rows(const RowSums& from, int rows, int width, int64_t to, const PartialRows& partials) {
    for (int row = 0; row < rows; ++row, ++to) {
      float* values = from.values + row * width;
      if constexpr (kInterleaved) Few::put_in_order(values, width);
      memcpy(partials.values + to * partials.stride, values, sizeof(float) * width);
      partials.largest[to] = from.largest[row];
      partials.sums[to] = from.sums[row];
    }
  }

  // The last cut's results, or those of all cuts, are written to the output, or to partial results that are merged later.
  template <bool kInterleaved>
  static void leave(const AttentionLayer& layer, const AttentionTensors& tensors, const AttentionTask& task, const Scratch& s,
                    int width, const PartialRows& partials) {
    const int group = layer.heads_per_kv_head, rows = task.num_tokens * group, all_rows = rows * task.num_kv_heads;
    const int64_t cuts = cuts_of(tensors, task);
    const bool folded = cuts > 1 && !task.each_cut;
    if (folded) fold_cut(s, all_rows, width);
    const RowSums& result = folded ? s.before : s.cut;
    if (task.partial_row >= 0) {
      int64_t to = task.partial_row + (task.each_cut ? (cuts - 1) * all_rows : 0);
      return leave_rows<kInterleaved>(result, all_rows, width, to, partials);
    }
    for (int row = 0; row < all_rows; ++row) {
      float* from = result.values + row * width;
      if constexpr (kInterleaved) Few::put_in_order(from, width);
      const int kv_head = task.kv_head + row / rows, head = row % group;
      T* to = output_row(layer, tensors, task.first_token + row % rows / group, kv_head, head);
      write(from, factor_of_values(result.largest[row], result.sums[row], sink_of(layer, tensors, kv_head, head)), layer.value_dim, to);
    }
  }

  static const float* sink_of(const AttentionLayer& layer, const AttentionTensors& tensors, int kv_head, int head) {
    return tensors.sinks ? tensors.sinks + kv_head * layer.heads_per_kv_head + head : nullptr;
  }

  static T* output_row(const AttentionLayer& layer, const AttentionTensors& tensors, int64_t token, int kv_head, int head) {
    int64_t heads = int64_t{layer.num_kv_heads} * layer.heads_per_kv_head;
    int64_t row = token * heads + kv_head * layer.heads_per_kv_head + head;
    return static_cast<T*>(tensors.output) + row * layer.value_dim;
  }

  static void write(const float* from, float factor, int head_dim, T* to) {
    int i = 0;
    for (; i + kWidth <= head_dim; i += kWidth) store(to + i, factor * load(from + i));
    if (i < head_dim) store_first(to + i, factor * load_first(from + i, head_dim - i), head_dim - i);
  }

  // Folds partial results in the order of their keys.
  static void merge(const AttentionLayer& layer, const AttentionTensors& tensors, const MergeTask& task,
                    const PartialRows& partials) {
    alignas(64) float merged[kMergedColumns];
    for (int head = 0; head < layer.heads_per_kv_head; ++head) {
      T* to = output_row(layer, tensors, task.token, task.kv_head, head);
      for (int column = 0; column < layer.value_dim; column += kMergedColumns) {
        int columns = layer.value_dim - column < kMergedColumns ? layer.value_dim - column : kMergedColumns;
        Floats largest = splat(kMinusInfinity), sum = splat(0.0f);
        memset(merged, 0, sizeof merged);
        for (int i = 0; i < task.num_partials; ++i) {
          int64_t row = task.partial_rows[i] + head;
          const Fold fold(largest, sum, splat(partials.largest[row]), splat(partials.sums[row]));
          fold_values(merged, partials.values + row * partials.stride + column, padded(columns), fold.later_is_larger[0], fold.factor[0]);
        }
        write(merged, factor_of_values(largest[0], sum[0], sink_of(layer, tensors, task.kv_head, head)), columns, to + column);
      }
    }
  }

  static constexpr int kMergedColumns = 256;
};

template <class T, class Units>
constexpr AttentionKernels::Of kKernelsOf{Attention<T, Units, T>::attend, Attention<T, Units, int8_t>::attend,
                                          Attention<T, Units, int8_t>::code, Attention<T, Units, T>::merge,
                                          Attention<T, Units, int8_t>::kInBytes};

}  // namespace
}  // namespace RADIXRT_ISA

template <>
const AttentionKernels& table_of<AttentionKernels, Isa::RADIXRT_ISA>() {
  using namespace RADIXRT_ISA;
#if defined(__AVX512BF16__)
  using BFloat16Units = PairUnits;
#else
  using BFloat16Units = FloatUnits;
#endif
  static constexpr AttentionKernels table{
      kKernelsOf<float, FloatUnits>,
      kKernelsOf<BFloat16, BFloat16Units>,
      kKernelsOf<Float16, FloatUnits>,
      scratch_bytes,
      kFewRows,
  };
  return table;
}

}  // namespace radixrt
