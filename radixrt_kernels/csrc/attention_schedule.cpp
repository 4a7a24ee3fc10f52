// Cuts queries into tiles and, where threads would wait for one another, keys into parts.
#include "attention_schedule.hpp"

#include <algorithm>

namespace radixrt {

namespace {

// A shared prefix below this many tokens costs more to merge than it saves to read.
constexpr int64_t kWorthSharing = 32;

// Keys are loaded and packed once a task, which costs about as much as computing this many rows.
constexpr int64_t kRowsOfPacking = 12;

// Parts of keys are not made smaller than this.
constexpr int64_t kLeastKeys = 256;

// Parts a thread: more of them even out better, fewer leave less to merge.
constexpr int64_t kPartsPerThread = 3;

// A tile of queries against a range of keys, the same for every KV head.
struct Piece {
  int first_token, num_tokens;
  const int32_t* pages;
  int64_t first_key, end_key;

  int64_t cost(const AttentionLayer& layer) const {
    return (int64_t{num_tokens} * layer.heads_per_kv_head + kRowsOfPacking) * (end_key - first_key);
  }
};

class Cutter {
 public:
  Cutter(const StepLayout& step, const AttentionLayer& layer)
      : step_(step), layer_(layer), tokens_at_most_(std::max(1, kTaskRows / layer.heads_per_kv_head)) {}

  std::vector<Piece> cut() {
    for (size_t group = 0; group < step_.shared_pages.size(); ++group) {
      int begin = step_.group_indptr[group], end = step_.group_indptr[group + 1];
      int64_t shared = int64_t{step_.shared_pages[group]} * step_.page_size;
      if (shared < kWorthSharing || end - begin < 2) shared = 0;
      if (shared) add_tiles(step_.query_indptr[begin], step_.query_indptr[end], begin, 0, shared);
      for (int sequence = begin; sequence < end; ++sequence)
        add_tiles(step_.query_indptr[sequence], step_.query_indptr[sequence + 1], sequence, shared, step_.kv_lengths[sequence]);
    }
    return std::move(pieces_);
  }

 private:
  // Tiles of the queries begin..end-1 against the keys from `first_key` up to `end_key` of a sequence, as far as they see them.
  void add_tiles(int begin, int end, int sequence, int64_t first_key, int64_t end_key) {
    const int32_t* pages = step_.pages.data() + step_.page_indptr[sequence];
    for (int token = begin; token < end; token += tokens_at_most_) {
      int count = std::min(tokens_at_most_, end - token);
      auto [lowest, highest] = std::minmax_element(&step_.positions[token], &step_.positions[token] + count);
      int64_t first = std::max(first_key, *lowest - layer_.window + 1), last = std::min(end_key, *highest + 1);
      if (first < last) pieces_.push_back({token, count, pages, first, last});
    }
  }

  const StepLayout& step_;
  const AttentionLayer& layer_;
  int tokens_at_most_;
  std::vector<Piece> pieces_;
};

// Pieces so large that one thread would still compute when the others have nothing left become several.
std::vector<Piece> split_keys(const std::vector<Piece>& pieces, const AttentionLayer& layer, int threads) {
  if (threads == 1) return pieces;
  int64_t total = 0;
  for (const auto& piece : pieces) total += piece.cost(layer) * layer.num_kv_heads;
  const int64_t limit = total / (threads * kPartsPerThread) + 1;
  std::vector<Piece> parts;
  for (const auto& piece : pieces) {
    int64_t keys = piece.end_key - piece.first_key;
    int64_t count = std::clamp((piece.cost(layer) + limit - 1) / limit, int64_t{1}, std::max(int64_t{1}, keys / kLeastKeys));
    for (int64_t part = 0; part < count; ++part) {
      Piece cut = piece;
      cut.first_key = piece.first_key + keys * part / count;
      cut.end_key = piece.first_key + keys * (part + 1) / count;
      parts.push_back(cut);
    }
  }
  return parts;
}

}  // namespace

AttentionSchedule make_schedule(const StepLayout& step, const AttentionLayer& layer, int threads) {
  auto pieces = split_keys(Cutter(step, layer).cut(), layer, threads);
  std::stable_sort(pieces.begin(), pieces.end(), [&](const Piece& a, const Piece& b) { return a.cost(layer) > b.cost(layer); });

  std::vector<int> parts_of(step.num_tokens(), 0);
  for (const auto& piece : pieces)
    for (int i = 0; i < piece.num_tokens; ++i) ++parts_of[piece.first_token + i];

  AttentionSchedule schedule;
  const int heads = layer.num_kv_heads;
  std::vector<std::vector<int64_t>> rows_of(static_cast<size_t>(step.num_tokens()) * heads);
  for (const auto& piece : pieces) {
    bool partial = parts_of[piece.first_token] > 1;  // all tokens of a piece have the same parts of keys
    for (int head = 0; head < heads; ++head) {
      int64_t row = partial ? schedule.num_partial_rows : -1;
      schedule.tasks.push_back({piece.first_token, piece.num_tokens, head, piece.pages, piece.first_key, piece.end_key, row});
      if (!partial) continue;
      for (int i = 0; i < piece.num_tokens; ++i)
        rows_of[(piece.first_token + i) * heads + head].push_back(row + i * layer.heads_per_kv_head);
      schedule.num_partial_rows += int64_t{piece.num_tokens} * layer.heads_per_kv_head;
    }
  }
  for (const auto& rows : rows_of) schedule.partial_rows.insert(schedule.partial_rows.end(), rows.begin(), rows.end());
  const int64_t* next = schedule.partial_rows.data();
  for (size_t i = 0; i < rows_of.size(); ++i) {
    if (rows_of[i].empty()) continue;
    schedule.merges.push_back({static_cast<int>(i / heads), static_cast<int>(i % heads), static_cast<int>(rows_of[i].size()), next});
    next += rows_of[i].size();
  }
  return schedule;
}

}  // namespace radixrt
