// Attention over a paged KV cache, as every instruction set offers it.
#pragma once

#include <cstdint>

namespace radixrt {

// The constants of one attention layer.
struct AttentionLayer {
  int num_kv_heads;
  int heads_per_kv_head;
  int head_dim;
  float scale;
  float soft_cap;  // 0: none
  int64_t window;  // a query sees itself and the window - 1 keys before it
};

// The tensors of one call. Strides are in elements; the last dimension is dense everywhere.
struct AttentionTensors {
  const void* query;  // [num_tokens, num_heads, head_dim]
  int64_t query_token_stride, query_head_stride;
  const void* key_cache;  // [num_pages, page_size, num_kv_heads, head_dim]
  const void* value_cache;
  int64_t key_page_stride, key_token_stride, key_head_stride;
  int64_t value_page_stride, value_token_stride, value_head_stride;
  void* output;  // [num_tokens, num_heads, head_dim], dense
  int page_size;
};

// Neighbouring queries of the flat batch, for neighbouring KV heads, against a range of the keys in one block table. Several KV heads
// only where each has at most `few_rows` rows (queries times heads that share a KV head), and all of them kTaskRows.
struct AttentionTask {
  int first_token, num_tokens;
  int kv_head, num_kv_heads;
  const int32_t* pages;  // the block table, from key 0 on
  int64_t first_key, end_key;
  int64_t partial_row;  // where to leave unfinished results, for each KV head num_tokens * heads_per_kv_head rows; -1: these are all keys
};

// Unfinished results: rows of weighted values, each with the largest score (times log2 e) and the sum of weights 2^(score - it).
struct PartialRows {
  float* values;  // [rows, head_dim]
  float* largest;
  float* sums;
};

// All unfinished results of one token and KV head, each heads_per_kv_head rows.
struct MergeTask {
  int token;
  int kv_head;
  int num_partials;
  const int64_t* partial_rows;
};

struct AttentionKernels {
  struct Of {
    // `positions` [num_tokens]: of each query in its sequence. `scratch` has `scratch_bytes(layer)` bytes, 64-byte aligned.
    void (*attend)(const AttentionLayer&, const AttentionTensors&, const AttentionTask&, const int64_t* positions,
                   const PartialRows&, void* scratch);
    void (*merge)(const AttentionLayer&, const AttentionTensors&, const MergeTask&, const PartialRows&);
  };
  Of float32, bfloat16, float16;
  int64_t (*scratch_bytes)(const AttentionLayer&);
  int few_rows;  // so many, or fewer, are computed without packing keys, many KV heads at a time
};

// Rows (queries times heads that share a KV head) of one task, at most; a single query may have more.
inline constexpr int kTaskRows = 128;

static inline int rows_at_most(int heads_per_kv_head) { return heads_per_kv_head > kTaskRows ? heads_per_kv_head : kTaskRows; }

}  // namespace radixrt
