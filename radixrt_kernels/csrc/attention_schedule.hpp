// Into which tasks is a step's attention cut, so that threads are evenly busy and what sequences share is read once?
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention.hpp"

namespace radixrt {

// A step's flat batch; AttentionMetadata in radixrt/attention/metadata.py says what each means. Everything was checked.
struct StepLayout {
  std::vector<int32_t> query_indptr;  // [sequences + 1]
  std::vector<int32_t> page_indptr;   // [sequences + 1]
  std::vector<int32_t> pages;         // [total pages]
  std::vector<int32_t> group_indptr;  // [groups + 1]
  std::vector<int32_t> shared_pages;  // [groups]
  std::vector<int64_t> kv_lengths;    // [sequences]
  std::vector<int64_t> positions;     // [num_tokens]
  int page_size;

  int num_tokens() const { return static_cast<int>(positions.size()); }
};

struct AttentionSchedule {
  std::vector<AttentionTask> tasks;  // those that take longest first
  std::vector<MergeTask> merges;
  std::vector<int64_t> partial_rows;  // what the merges point into
  int64_t num_partial_rows = 0;
};

// `few_rows`: see AttentionKernels.
AttentionSchedule make_schedule(const StepLayout& step, const AttentionLayer& layer, int threads, int few_rows);

}  // namespace radixrt
