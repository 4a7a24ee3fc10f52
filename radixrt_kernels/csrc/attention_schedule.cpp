// Divides queries into tiles and, if threads would wait for one another, keys into parts.
#include "attention_schedule.hpp"

#include <algorithm>
#include <utility>

namespace radixrt {

namespace {

// Loading and packing the keys of a task costs about as much as computing this number of rows.
constexpr int64_t kRowsOfPacking = 12;

// Elements of neighbouring KV heads that a task of few rows reads together: longer reads have more bandwidth.
constexpr int kRowElements = 1024;

// Parts per thread: more parts balance better, fewer parts need fewer merges.
constexpr int64_t kPartsPerThread = 3;

// More partial results than this are not worth the balance.
constexpr int64_t kMostPartialBytes = 64 << 20;

// A tile of queries and a range of keys, the same for every KV head.
struct Piece {
  int first_token, num_tokens;
  const int32_t* pages;
  int64_t first_key, end_key;

  int rows(const AttentionLayer& layer) const { return num_tokens * layer.heads_per_kv_head; }

  int64_t first_cut(int64_t keys_per_cut) const { return first_key / keys_per_cut; }
  int64_t end_cut(int64_t keys_per_cut) const { return (end_key - 1) / keys_per_cut + 1; }

  int64_t cost(const AttentionLayer& layer) const {
    return (rows(layer) + kRowsOfPacking) * (end_key - first_key);
  }
};

class Cutter {
 public:
  Cutter(const StepLayout& step, const AttentionLayer& layer)
      : step_(step), layer_(layer), tokens_at_most_(std::max(1, kTaskRows / layer.heads_per_kv_head)) {}

  std::vector<Piece> cut() {
    for (size_t group = 0; group < step_.shared_pages.size(); ++group) {
      int begin = step_.group_indptr[group], end = step_.group_indptr[group + 1];
      int64_t shared = int64_t{step_.shared_pages[group]} * step_.page_size / step_.keys_per_cut * step_.keys_per_cut;
      if (!worth_sharing(begin, end, shared)) shared = 0;
      if (shared) add_tiles(step_.query_indptr[begin], step_.query_indptr[end], begin, 0, shared);
      for (int sequence = begin; sequence < end; ++sequence)
        add_tiles(step_.query_indptr[sequence], step_.query_indptr[sequence + 1], sequence, shared, step_.kv_lengths[sequence]);
    }
    return std::move(pieces_);
  }

 private:
  // Whether the `shared` keys that the sequences begin..end-1 read only once take more memory traffic than the partial results do: one for
  // the shared keys and one for each later cut.
  bool worth_sharing(int begin, int end, int64_t shared) const {
    int64_t partial_rows = 0;
    for (int i = begin; i < end; ++i) {
      int64_t own_cuts = (step_.kv_lengths[i] - shared + step_.keys_per_cut - 1) / step_.keys_per_cut;
      partial_rows += (step_.query_indptr[i + 1] - step_.query_indptr[i]) * (1 + own_cuts) * layer_.heads_per_kv_head;
    }
    // A row of keys and one of values, in two bytes or four, against float32 rows that are written and read.
    return 2 * partial_rows < (end - begin - 1) * shared;
  }

  // Tiles of the queries begin..end-1 against the keys from `first_key` up to `end_key` of a sequence, as far as they are visible.
  void add_tiles(int begin, int end, int sequence, int64_t first_key, int64_t end_key) {
    const int32_t* pages = step_.pages.data() + step_.page_indptr[sequence];
    for (int token = begin; token < end; token += tokens_at_most_) {
      int count = std::min(tokens_at_most_, end - token);
      auto [lowest, highest] = std::minmax_element(&step_.positions[token], &step_.positions[token] + count);
      int64_t first = std::max(first_key, *lowest - layer_.window + 1) / kBlockKeys * kBlockKeys, last = std::min(end_key, *highest + 1);
      if (first < last) pieces_.push_back({token, count, pages, first, last});
    }
  }

  const StepLayout& step_;
  const AttentionLayer& layer_;
  int tokens_at_most_;
  std::vector<Piece> pieces_;
};

// Divides the KV heads of a piece into tasks.
struct HeadsTogether {
  int few_rows;  // pieces with more rows are computed head by head
  int most;

  int of(const Piece& piece, const AttentionLayer& layer) const {
    int rows = piece.rows(layer);
    if (rows > few_rows) return 1;
    int fit = std::min({most, layer.num_kv_heads, kTaskRows / rows, std::max(1, kRowElements / layer.head_dim)});
    int tasks = (layer.num_kv_heads + fit - 1) / fit;
    return (layer.num_kv_heads + tasks - 1) / tasks;
  }
};

// Splits pieces whose cost is above a `wanted`-th of the total, at cuts.
std::vector<Piece> split_keys(
    const std::vector<Piece>& pieces, const AttentionLayer& layer, int64_t keys_per_cut, int64_t wanted, HeadsTogether together) {
  if (wanted < 2) return pieces;
  int64_t total = 0;
  for (const auto& piece : pieces) total += piece.cost(layer) * layer.num_kv_heads;
  const int64_t limit = total / wanted + 1;
  std::vector<Piece> parts;
  for (const auto& piece : pieces) {
    int64_t keys = piece.end_key - piece.first_key, cost = piece.cost(layer) * together.of(piece, layer);
    int64_t count = std::clamp((cost + limit - 1) / limit, int64_t{1}, std::max(int64_t{1}, keys / keys_per_cut));
    int64_t first = piece.first_cut(keys_per_cut), cuts = piece.end_cut(keys_per_cut) - first;
    for (int64_t part = 0; part < count; ++part) {
      Piece own = piece;
      own.first_key = std::max(piece.first_key, (first + cuts * part / count) * keys_per_cut);
      own.end_key = std::min(piece.end_key, (first + cuts * (part + 1) / count) * keys_per_cut);
      parts.push_back(own);
    }
  }
  return parts;
}

int64_t count_tasks(const std::vector<Piece>& pieces, const AttentionLayer& layer, HeadsTogether together) {
  int64_t count = 0;
  for (const auto& piece : pieces) {
    int heads = together.of(piece, layer);
    count += (layer.num_kv_heads + heads - 1) / heads;
  }
  return count;
}

// About `wanted` tasks, if the pieces have that many cuts and KV heads.
std::pair<std::vector<Piece>, HeadsTogether> divide(
    const std::vector<Piece>& whole, const AttentionLayer& layer, int64_t keys_per_cut, int64_t wanted, int few_rows) {
  HeadsTogether together{few_rows, layer.num_kv_heads};
  auto pieces = split_keys(whole, layer, keys_per_cut, wanted, together);
  while (together.most > 1 && count_tasks(pieces, layer, together) < wanted) {
    together.most = (together.most + 1) / 2;
    pieces = split_keys(whole, layer, keys_per_cut, wanted, together);
  }
  return {std::move(pieces), together};
}

// `pieces`: of each token in the order of their keys.
AttentionSchedule assign(const StepLayout& step, const AttentionLayer& layer, const std::vector<Piece>& pieces, HeadsTogether together) {
  std::vector<int> parts_of(step.num_tokens(), 0), parts_before(step.num_tokens(), 0);
  for (const auto& piece : pieces)
    for (int i = 0; i < piece.num_tokens; ++i) ++parts_of[piece.first_token + i];

  AttentionSchedule schedule;
  const int heads = layer.num_kv_heads;
  std::vector<std::vector<int64_t>> rows_of(static_cast<size_t>(step.num_tokens()) * heads);
  for (const auto& piece : pieces) {
    const int token = piece.first_token, end = token + piece.num_tokens;
    const bool partial = *std::max_element(&parts_of[token], parts_of.data() + end) > 1;
    const bool each_cut = *std::max_element(&parts_before[token], parts_before.data() + end) > 0;
    for (int i = token; i < end; ++i) ++parts_before[i];
    const int64_t results = each_cut ? piece.end_cut(step.keys_per_cut) - piece.first_cut(step.keys_per_cut) : 1;
    const int at_once = together.of(piece, layer);
    for (int head = 0; head < heads; head += at_once) {
      const int count = std::min(at_once, heads - head);
      int64_t row = partial ? schedule.num_partial_rows : -1;
      schedule.tasks.push_back({token, piece.num_tokens, head, count, piece.pages, piece.first_key, piece.end_key, row, each_cut});
      if (!partial) continue;
      for (int64_t result = 0; result < results; ++result)
        for (int i = 0; i < count; ++i)
          for (int query = token; query < end; ++query, row += layer.heads_per_kv_head) rows_of[query * heads + head + i].push_back(row);
      schedule.num_partial_rows = row;
    }
  }
  auto cost = [&](const AttentionTask& task) {
    return (task.num_tokens * layer.heads_per_kv_head + kRowsOfPacking) * (task.end_key - task.first_key) * task.num_kv_heads;
  };
  std::stable_sort(schedule.tasks.begin(), schedule.tasks.end(), [&](const auto& a, const auto& b) { return cost(a) > cost(b); });
  for (const auto& rows : rows_of) schedule.partial_rows.insert(schedule.partial_rows.end(), rows.begin(), rows.end());
  const int64_t* next = schedule.partial_rows.data();
  for (size_t i = 0; i < rows_of.size(); ++i) {
    if (rows_of[i].empty()) continue;
    schedule.merges.push_back({static_cast<int>(i / heads), static_cast<int>(i % heads), static_cast<int>(rows_of[i].size()), next});
    next += rows_of[i].size();
  }
  return schedule;
}

}  // namespace

AttentionSchedule make_schedule(const StepLayout& step, const AttentionLayer& layer, int threads, int few_rows) {
  const auto whole = Cutter(step, layer).cut();
  for (int64_t wanted = threads == 1 ? 1 : threads * kPartsPerThread;; wanted /= 2) {
    auto [pieces, together] = divide(whole, layer, step.keys_per_cut, wanted, few_rows);
    auto schedule = assign(step, layer, pieces, together);
    if (wanted < 2 || schedule.num_partial_rows * partial_stride(layer.value_dim) * 4 <= kMostPartialBytes) return schedule;
  }
}

}  // namespace radixrt
