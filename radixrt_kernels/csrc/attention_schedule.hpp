// Divides the attention of a step into tasks of balanced size that read shared prefixes once. No division changes a bit of the result.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention.hpp"

namespace radixrt {

// The flat batch of a step; AttentionMetadata in radixrt/attention/metadata.py describes the fields. All values are checked.
struct StepLayout {
  std::vector<int32_t> query_indptr;  // [sequences + 1]
  std::vector<int32_t> page_indptr;   // [sequences + 1]
  std::vector<int32_t> pages;         // [total pages]
  std::vector<int32_t> group_indptr;  // [groups + 1]
  std::vector<int32_t> shared_pages;  // [groups]
  std::vector<int64_t> kv_lengths;    // [sequences]
  std::vector<int64_t> positions;     // [num_tokens]
  int page_size;
  int64_t keys_per_cut;  // a multiple of kBlockKeys

  int num_tokens() const { return static_cast<int>(positions.size()); }
};

struct AttentionSchedule {
  std::vector<AttentionTask> tasks;  // longest tasks first
  std::vector<MergeTask> merges;
  std::vector<int64_t> partial_rows;  // indices used by the merges
  int64_t num_partial_rows = 0;
};

// `few_rows`: see AttentionKernels.
AttentionSchedule make_schedule(const StepLayout& step, const AttentionLayer& layer, int threads, int few_rows);

}  // namespace radixrt
