// Python binding of attention: one plan per step, one call per layer.
#include "kernels/attention.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "attention_schedule.hpp"
#include "bind/bind.hpp"
#include "isa.hpp"
#include "tensor.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace radixrt {

namespace {

constexpr int64_t kTokensPerThread = 512;  // tokens whose keys and values one thread copies
constexpr int64_t kMergesPerThread = 32;

// Scratch memory of a thread, kept between calls.
class Buffer {
 public:
  ~Buffer() { std::free(memory_); }

  void* of(int64_t bytes) {
    if (bytes > bytes_) {
      std::free(memory_);
      bytes_ = (bytes + 4095) / 4096 * 4096;
      memory_ = std::aligned_alloc(64, bytes_);
      if (memory_ == nullptr) throw std::bad_alloc();
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  int64_t bytes_ = 0;
};

template <class T>
std::vector<T> copied(const Tensor& tensor, DType dtype, const char* what) {
  require(tensor.dimensions == 1 && tensor.dtype == dtype && tensor.dense(), what, tensor);
  return {tensor.as<T>(), tensor.as<T>() + tensor.shape[0]};
}

bool ascends_from_zero(const std::vector<int32_t>& indptr) {
  return !indptr.empty() && indptr[0] == 0 && std::is_sorted(indptr.begin(), indptr.end());
}

StepLayout read_layout(const Tensor& query_indptr, const Tensor& page_indptr, const Tensor& last_page_lengths, const Tensor& pages,
                       int page_size, int keys_per_cut) {
  StepLayout step;
  require(page_size >= 1, "page_size must be at least 1");
  require(keys_per_cut >= kBlockKeys && keys_per_cut % kBlockKeys == 0, "keys_per_cut must be a multiple of 64");
  step.page_size = page_size;
  step.keys_per_cut = keys_per_cut;
  step.query_indptr = copied<int32_t>(query_indptr, DType::int32, "qo_indptr must be int32[batch + 1]");
  step.page_indptr = copied<int32_t>(page_indptr, DType::int32, "kv_indptr must be int32[batch + 1]");
  step.pages = copied<int32_t>(pages, DType::int32, "kv_indices must be int32[total_pages]");
  auto last = copied<int32_t>(last_page_lengths, DType::int32, "last_page_len must be int32[batch]");
  require(ascends_from_zero(step.query_indptr) && step.query_indptr.size() == last.size() + 1,
          "qo_indptr must ascend from 0 and have one entry more than last_page_len");
  require(ascends_from_zero(step.page_indptr) && step.page_indptr.size() == last.size() + 1 &&
              step.page_indptr.back() <= static_cast<int64_t>(step.pages.size()),
          "kv_indptr must ascend from 0 up to at most the length of kv_indices, and have one entry more than last_page_len");
  for (size_t i = 0; i < last.size(); ++i) {
    int64_t num_pages = step.page_indptr[i + 1] - step.page_indptr[i], queries = step.query_indptr[i + 1] - step.query_indptr[i];
    require(last[i] >= 1 && last[i] <= page_size, "last_page_len must be in 1..page_size");
    int64_t length = (num_pages - 1) * page_size + last[i];
    require(num_pages >= 1 && queries <= length, "a sequence must have a page, and no more queries than keys");
    step.kv_lengths.push_back(length);
    for (int64_t query = 0; query < queries; ++query) step.positions.push_back(length - queries + query);
  }
  return step;
}

void read_groups(StepLayout& step, const std::optional<std::pair<Tensor, Tensor>>& groups) {
  int sequences = static_cast<int>(step.kv_lengths.size());
  if (!groups) {
    step.group_indptr = {0, sequences};
    step.shared_pages = {0};
    return;
  }
  step.group_indptr = copied<int32_t>(groups->first, DType::int32, "group_indptr must be int32[groups + 1]");
  step.shared_pages = copied<int32_t>(groups->second, DType::int32, "num_pages must be int32[groups]");
  require(ascends_from_zero(step.group_indptr) && step.group_indptr.back() == sequences &&
              step.group_indptr.size() == step.shared_pages.size() + 1,
          "group_indptr must ascend from 0 to the number of sequences and have one entry more than num_pages");
  for (size_t group = 0; group < step.shared_pages.size(); ++group) {
    int begin = step.group_indptr[group], end = step.group_indptr[group + 1];
    int64_t shared = step.shared_pages[group];
    require(shared >= 0, "num_pages of a group must not be negative");
    if (shared == 0) continue;
    for (int i = begin; i < end; ++i) {
      require(step.page_indptr[i + 1] - step.page_indptr[i] >= shared &&
                  std::equal(&step.pages[step.page_indptr[i]], &step.pages[step.page_indptr[i]] + shared,
                             &step.pages[step.page_indptr[begin]]),
              "the members of a group must begin with the same num_pages pages");
      int64_t queries = step.query_indptr[i + 1] - step.query_indptr[i];
      require(shared * step.page_size <= step.kv_lengths[i] - queries, "shared pages must lie before every query of a group");
    }
  }
}

class AttentionPlan {
 public:
  AttentionPlan(const Tensor& query_indptr, const Tensor& page_indptr, const Tensor& last_page_lengths, const Tensor& pages,
                const Tensor& slots, int page_size, const std::optional<std::pair<Tensor, Tensor>>& groups, int keys_per_cut)
      : step_(read_layout(query_indptr, page_indptr, last_page_lengths, pages, page_size, keys_per_cut)),
        slots_(copied<int64_t>(slots, DType::int64, "kv_slots must be int64[num_tokens]")) {
    require(static_cast<int>(slots_.size()) == step_.num_tokens(), "kv_slots must have as many entries as there are queries");
    read_groups(step_, groups);
    for (int32_t page : step_.pages) {
      require(page >= 0, "kv_indices must not be negative");
      end_page_ = std::max(end_page_, int64_t{page} + 1);
    }
    for (int64_t slot : slots_) {
      require(slot >= 0, "kv_slots must not be negative");
      end_page_ = std::max(end_page_, slot / page_size + 1);
    }
  }

  // Without `key`, those of the step are in the caches already. Without `value_cache`, the first features of a key are its value.
  void attend(const Tensor& query, const std::optional<Tensor>& key, const std::optional<Tensor>& value, const Tensor& key_cache,
              const std::optional<Tensor>& value_cache, const Tensor& output, float scale, int64_t window, float soft_cap,
              const std::optional<Tensor>& sinks) {
    const auto& kernels_of = kernels_for(query);
    const bool latent = !value_cache, coded = is_coded(key_cache);
    check(query, key, value, key_cache, value_cache, output);
    if (sinks)
      require(sinks->dimensions == 1 && sinks->shape[0] == query.shape[1] && sinks->dtype == DType::float32 && sinks->dense(),
              "sinks must be float32 [num_heads]", *sinks);
    require(window >= 0 && soft_cap >= 0, "sliding_window and soft_cap must not be negative; 0 is none");
    const int head_dim = static_cast<int>(query.shape[2]), value_dim = static_cast<int>(output.shape[2]);
    const int num_kv_heads = static_cast<int>(key_cache.shape[2]), group = static_cast<int>(query.shape[1]) / num_kv_heads;
    AttentionLayer layer{num_kv_heads, group, head_dim, value_dim, coded && !latent ? scale / hadamard_block(head_dim) : scale,
                         soft_cap, window ? window : int64_t{1} << 40, latent};
    AttentionTensors tensors = describe(query, key_cache, latent ? key_cache : *value_cache, output);
    tensors.sinks = sinks ? sinks->as<float>() : nullptr;
    nb::gil_scoped_release release;
    if (key && latent && coded) {
      append(*key, key_cache, {{0, value_dim, 0, false}, {value_dim, head_dim - value_dim, value_dim + kScaleBytes, true}}, kernels_of);
    } else if (key) {
      append(*key, key_cache, {{0, head_dim, 0, true}}, kernels_of);
      if (!latent) append(*value, *value_cache, {{0, value_dim, 0, false}}, kernels_of);
    }
    compute(layer, tensors, coded ? kernels_of.attend_coded : kernels_of.attend, kernels_of.merge,
            coded && kernels_of.in_bytes && head_dim == value_dim);
  }

 private:
  static const AttentionKernels::Of& kernels_for(const Tensor& query) {
    const auto& table = kernels<AttentionKernels>();
    switch (query.dtype) {
      case DType::float32: return table.float32;
      case DType::bfloat16: return table.bfloat16;
      case DType::float16: return table.float16;
      default: throw nb::type_error("query, key and value must be float32, bfloat16 or float16");
    }
  }

  void check(const Tensor& query, const std::optional<Tensor>& key, const std::optional<Tensor>& value, const Tensor& key_cache,
             const std::optional<Tensor>& value_cache, const Tensor& output) const {
    require(query.dimensions == 3 && query.shape[0] == step_.num_tokens() && query.dense_after(1),
            "query must be [num_tokens, num_heads, head_dim] of the planned step, heads without gaps in them", query);
    const int64_t head_dim = query.shape[2];
    require(head_dim >= 2 && head_dim % 2 == 0, "head_dim must be even", query);
    require(output.dimensions == 3 && output.shape[0] == query.shape[0] && output.shape[1] == query.shape[1] &&
                output.shape[2] >= 2 && output.shape[2] % 2 == 0 && output.dtype == query.dtype && output.dense(),
            "output must be [num_tokens, num_heads, value_dim] of query's dtype, value_dim even, without gaps", output);
    const int64_t value_dim = output.shape[2];
    const bool coded = is_coded(key_cache), latent = !value_cache;
    require(!latent || value_dim < head_dim, "output must have fewer features than query where there is no value cache", output);
    require(!coded || std::max(head_dim, value_dim) <= kMostCoded, "an int8 cache takes heads of up to 1024 features", key_cache);
    check_cache(key_cache, query, key_cache.shape[2], head_dim + (coded ? (1 + latent) * kScaleBytes : 0));
    if (value_cache) check_cache(*value_cache, query, key_cache.shape[2], value_dim + (coded ? kScaleBytes : 0));
    const int64_t num_kv_heads = key_cache.shape[2];
    require(num_kv_heads >= 1 && query.shape[1] % num_kv_heads == 0, "query must have a multiple of key's heads", query);
    require(value.has_value() == (key.has_value() && !latent),
            "key and value must be given both, or neither; without a value cache, there is no value");
    for (const auto& [states, features] : {std::pair{&key, head_dim}, std::pair{&value, value_dim}})
      if (*states)
        require((*states)->dimensions == 3 && (*states)->shape[0] == query.shape[0] && (*states)->shape[1] == num_kv_heads &&
                    (*states)->shape[2] == features && (*states)->dtype == query.dtype && (*states)->dense_after(1),
                "key and value must be [num_tokens, num_kv_heads, head_dim or value_dim] of query's dtype, heads without gaps in them",
                **states);
  }

  void check_cache(const Tensor& cache, const Tensor& query, int64_t heads, int64_t elements) const {
    require(cache.dimensions == 4 && cache.shape[0] >= end_page_ && cache.shape[1] == step_.page_size && cache.shape[2] == heads &&
                cache.shape[3] == elements && (is_coded(cache) || cache.dtype == query.dtype) && cache.dense_after(3),
            "the caches must be [num_pages, page_size, num_kv_heads, features] of query's dtype or int8 with two bytes for each scale, with "
            "every planned page",
            cache);
  }

  AttentionTensors describe(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& output) const {
    return {query.data,
            query.strides[0],
            query.strides[1],
            key_cache.data,
            value_cache.data,
            key_cache.strides[0],
            key_cache.strides[1],
            key_cache.strides[2],
            value_cache.strides[0],
            value_cache.strides[1],
            value_cache.strides[2],
            output.data,
            step_.page_size,
            step_.keys_per_cut,
            nullptr};
  }

  static bool is_coded(const Tensor& cache) { return cache.dtype == DType::int8; }

  // Some features of a head, and their place in a cached head.
  struct Features {
    int64_t first, count, place;
    bool rotated;  // before they are coded
  };

  // All keys and values of a step are written before any attention, because sequences may read one another's.
  void append(const Tensor& states, const Tensor& cache, std::initializer_list<Features> parts, const AttentionKernels::Of& kernels_of) const {
    const int64_t element = size_of(states.dtype), cached = size_of(cache.dtype), heads = states.shape[1];
    const bool coded = is_coded(cache);
    parallel_ranges(states.shape[0], kTokensPerThread, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        int64_t page = slots_[token] / step_.page_size, offset = slots_[token] % step_.page_size;
        const char* from = states.as<char>() + token * states.strides[0] * element;
        char* to = cache.as<char>() + (page * cache.strides[0] + offset * cache.strides[1]) * cached;
        for (int64_t head = 0; head < heads; ++head)
          for (const Features& part : parts) {
            const char* state = from + (head * states.strides[1] + part.first) * element;
            char* place = to + (head * cache.strides[2] + part.place) * cached;
            if (coded)
              kernels_of.code(state, static_cast<int>(part.count), part.rotated, reinterpret_cast<int8_t*>(place));
            else
              std::memcpy(place, state, part.count * element);
          }
      }
    });
  }

  void compute(const AttentionLayer& layer, const AttentionTensors& tensors, decltype(AttentionKernels::Of::attend) attend,
               decltype(AttentionKernels::Of::merge) merge, bool in_bytes) {
    const int few_rows = kernels<AttentionKernels>().few_rows;
    const auto& schedule = schedule_for(layer, in_bytes && layer.heads_per_kv_head > few_rows ? kTaskRows : few_rows);
    const int64_t scratch_bytes = kernels<AttentionKernels>().scratch_bytes(layer);
    PartialRows partials = room_for(schedule.num_partial_rows, layer.value_dim);
    parallel_for(static_cast<int64_t>(schedule.tasks.size()), [&](int64_t index, int) {
      thread_local Buffer scratch;
      attend(layer, tensors, schedule.tasks[index], step_.positions.data(), partials, scratch.of(scratch_bytes));
    });
    parallel_ranges(static_cast<int64_t>(schedule.merges.size()), kMergesPerThread, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) merge(layer, tensors, schedule.merges[i], partials);
    });
  }

  // Layers with the same heads and window share a schedule. A model has one or two schedules.
  const AttentionSchedule& schedule_for(const AttentionLayer& layer, int few_rows) {
    int threads = num_threads();
    for (const auto& known : schedules_)
      if (known.layer.num_kv_heads == layer.num_kv_heads && known.layer.heads_per_kv_head == layer.heads_per_kv_head &&
          known.layer.head_dim == layer.head_dim && known.layer.value_dim == layer.value_dim && known.layer.window == layer.window && known.threads == threads && known.few_rows == few_rows)
        return known.schedule;
    schedules_.push_back({layer, threads, few_rows, make_schedule(step_, layer, threads, few_rows)});
    return schedules_.back().schedule;
  }

  static PartialRows room_for(int64_t rows, int value_dim) {
    thread_local Buffer buffer;
    const int64_t stride = partial_stride(value_dim);
    if (rows == 0) return {stride, nullptr, nullptr, nullptr};
    auto memory = static_cast<float*>(buffer.of(rows * (stride + 2) * static_cast<int64_t>(sizeof(float))));
    return {stride, memory, memory + rows * stride, memory + rows * (stride + 1)};
  }

  struct KnownSchedule {
    AttentionLayer layer;
    int threads, few_rows;
    AttentionSchedule schedule;
  };

  StepLayout step_;
  std::vector<int64_t> slots_;  // [num_tokens]
  int64_t end_page_ = 0;        // the caches must have this many pages
  std::list<KnownSchedule> schedules_;
};

}  // namespace

void bind_attention(nb::module_& module) {
  nb::class_<AttentionPlan>(module, "AttentionPlan")
      .def(nb::init<const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int,
                    const std::optional<std::pair<Tensor, Tensor>>&, int>(),
           nb::arg("qo_indptr"), nb::arg("kv_indptr"), nb::arg("last_page_len"), nb::arg("kv_indices"), nb::arg("kv_slots"),
           nb::arg("page_size"), nb::arg("groups").none(), nb::arg("keys_per_cut"))
      .def("attend", &AttentionPlan::attend, nb::arg("query"), nb::arg("key").none(), nb::arg("value").none(),
           nb::arg("key_cache"), nb::arg("value_cache").none(), nb::arg("output"), nb::arg("scale"), nb::arg("sliding_window"), nb::arg("soft_cap"),
           nb::arg("sinks") = nb::none());
}

}  // namespace radixrt
