// Attention over a paged KV cache: interface of every instruction set.
#pragma once

#include <cstdint>

namespace radixrt {

// The constants of one attention layer.
struct AttentionLayer {
  int num_kv_heads;
  int heads_per_kv_head;
  int head_dim;   // features of a query and a key
  int value_dim;  // features of a value and a result
  float scale;
  float soft_cap;  // 0: none
  int64_t window;  // visible keys, including the query's own position
  bool latent;     // one cache: a value is the first `value_dim` features of its key
};

// The tensors of one call. Strides are in elements; the last dimension is dense everywhere.
struct AttentionTensors {
  const void* query;  // [num_tokens, num_heads, head_dim]
  int64_t query_token_stride, query_head_stride;
  const void* key_cache;    // [num_pages, page_size, num_kv_heads, head_dim], or coded heads: [..., head_dim + kScaleBytes] int8
  const void* value_cache;  // the same with value_dim; of a latent layer, the key cache
  int64_t key_page_stride, key_token_stride, key_head_stride;
  int64_t value_page_stride, value_token_stride, value_head_stride;
  void* output;  // [num_tokens, num_heads, value_dim], dense
  int page_size;
  int64_t keys_per_cut;
  const float* sinks;  // [num_heads] a score of each head that takes part in the softmax and has no value, or null
};

// Keys that are computed together. A multiple of the widest vector.
inline constexpr int kBlockKeys = 64;

// Keys are cut at the multiples of `keys_per_cut`, counted from the beginning of the sequence. The results of the cuts are folded into one
// another in ascending order. This is the definition of the result, so it has the same bits in any division into tasks: tasks begin and
// end at cuts. Only the keys before a sliding window are left out by blocks, because invisible keys add exact zeros.
//
// Consecutive queries of the flat batch and consecutive KV heads, with a range of the keys of one block table. A task has several KV
// heads only if each has at most `few_rows` rows (queries times heads that share a KV head), or if codes are multiplied in bytes, and all
// together at most kTaskRows.
struct AttentionTask {
  int first_token, num_tokens;
  int kv_head, num_kv_heads;
  const int32_t* pages;  // the block table, from key 0 on
  int64_t first_key, end_key;
  int64_t partial_row;  // row of the partial results, num_tokens * heads_per_kv_head rows per KV head; -1: the task has all keys
  bool each_cut;        // every cut has partial results of its own, one after the other; else the task has the first keys, and one result
};

// Partial results: rows of weighted values, each with its largest score (times log2 e) and the sum of the weights 2^(score - largest).
struct PartialRows {
  int64_t stride;  // of the rows of values
  float* values;   // [rows, stride]
  float* largest;
  float* sums;
};

// All partial results of one token and KV head, heads_per_kv_head rows each, in the order of their keys.
struct MergeTask {
  int token;
  int kv_head;
  int num_partials;
  const int64_t* partial_rows;
};

// A coded latent is two coded heads, one behind the other: its first value_dim features as a value, the others as a key.
//
// Coded heads: integers of at most 127, and behind them their scale in bfloat16. They are multiplied by a Hadamard matrix before they are
// rounded, block by block of `hadamard_block` features, so that no large feature takes the precision of the others. Queries are multiplied
// by it too, which multiplies the scores by the size of a block. Values are not.
inline constexpr int kScaleBytes = 2;
inline constexpr int kMostCoded = 1024;  // features of a head

// The largest power of two that divides head_dim.
static inline int hadamard_block(int head_dim) { return head_dim & -head_dim; }

struct AttentionKernels {
  struct Of {
    // `positions` [num_tokens]: position of each query in its sequence. `scratch` has `scratch_bytes(layer)` bytes, 64-byte aligned.
    void (*attend)(const AttentionLayer&, const AttentionTensors&, const AttentionTask&, const int64_t* positions,
                   const PartialRows&, void* scratch);
    // The same over coded heads.
    void (*attend_coded)(const AttentionLayer&, const AttentionTensors&, const AttentionTask&, const int64_t* positions,
                         const PartialRows&, void* scratch);
    void (*code)(const void* head, int head_dim, bool rotated, int8_t* to);
    void (*merge)(const AttentionLayer&, const AttentionTensors&, const MergeTask&, const PartialRows&);
    bool in_bytes;  // codes are multiplied without decoding them, if more than `few_rows` heads share a KV head, and values are as wide as keys
  };
  Of float32, bfloat16, float16;
  int64_t (*scratch_bytes)(const AttentionLayer&);
  int few_rows;  // maximum number of rows computed without packing keys, with several KV heads together
};

// Maximum rows (queries times heads that share a KV head) of one task; a single query may have more.
inline constexpr int kTaskRows = 128;

// The stride of partial rows: values in whole steps of every instruction set.
static inline int64_t partial_stride(int value_dim) { return (value_dim + 31) / 32 * 32; }

static inline int rows_at_most(int heads_per_kv_head) { return heads_per_kv_head > kTaskRows ? heads_per_kv_head : kTaskRows; }

}  // namespace radixrt
