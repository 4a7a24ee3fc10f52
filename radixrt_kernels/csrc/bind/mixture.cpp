// Python binding of a mixture of experts' operations besides its products.
#include "kernels/mixture.hpp"

#include <vector>

#include "bind/bind.hpp"
#include "isa.hpp"
#include "tensor.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace radixrt {

namespace {

constexpr int64_t kLogitsPerThread = 4096;  // some microseconds of work
constexpr int64_t kElementsPerThread = 16384;

const MixtureKernels::Of& kernels_for(DType dtype) {
  const auto& table = kernels<MixtureKernels>();
  switch (dtype) {
    case DType::float32: return table.float32;
    case DType::bfloat16: return table.bfloat16;
    case DType::float16: return table.float16;
    default: throw nb::type_error("logits and values must be float32, bfloat16 or float16");
  }
}

bool is_table(const Tensor& tensor, int64_t tokens, DType dtype) {
  return tensor.dimensions == 2 && tensor.shape[0] == tokens && tensor.dense() && tensor.dtype == dtype;
}

void choose_experts(const Tensor& logits, bool among_chosen, const Tensor& weights, const Tensor& experts) {
  require(logits.dimensions == 2 && logits.dense_after(0), "logits must be [num_tokens, experts], rows without gaps", logits);
  int64_t tokens = logits.shape[0], count = logits.shape[1];
  require(is_table(experts, tokens, DType::int64), "experts must be [num_tokens, top_k] int64", experts);
  int64_t top_k = experts.shape[1];
  require(top_k >= 1 && top_k <= count, "top_k must be from 1 to the number of experts");
  require(is_table(weights, tokens, DType::float32) && weights.shape[1] == top_k, "weights must be [num_tokens, top_k] float32", weights);
  const auto& kernel = kernels_for(logits.dtype);
  int64_t row_bytes = logits.strides[0] * size_of(logits.dtype);
  nb::gil_scoped_release release;
  parallel_ranges(tokens, kLogitsPerThread / count + 1, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token)
      kernel.choose(
          logits.as<char>() + token * row_bytes, count, top_k, among_chosen, weights.as<float>() + token * top_k,
          experts.as<int64_t>() + token * top_k);
  });
}

// A stable counting sort of the (token, choice) pairs by expert.
void group_by_expert(const Tensor& experts, const Tensor& starts, const Tensor& tokens, const Tensor& places) {
  require(experts.dimensions == 2 && experts.dense() && experts.dtype == DType::int64, "experts must be [num_tokens, top_k] int64", experts);
  int64_t pairs = experts.elements(), top_k = experts.shape[1];
  require(pairs < INT32_MAX, "experts must have fewer than 2^31 elements", experts);
  require(starts.dimensions == 1 && starts.dense() && starts.dtype == DType::int32 && starts.shape[0] >= 2,
          "starts must be [experts + 1] int32", starts);
  require(tokens.dimensions == 1 && tokens.shape[0] == pairs && tokens.dense() && tokens.dtype == DType::int32,
          "tokens must be int32, one for each element of experts", tokens);
  require(is_table(places, experts.shape[0], DType::int32) && places.shape[1] == top_k, "places must be int32 of experts' shape", places);
  auto ids = experts.as<int64_t>();
  int64_t count = starts.shape[0] - 1;
  for (int64_t pair = 0; pair < pairs; ++pair)
    require(ids[pair] >= 0 && ids[pair] < count, "experts must hold numbers from 0 to the number of experts - 1");
  auto start = starts.as<int32_t>(), token = tokens.as<int32_t>(), place = places.as<int32_t>();
  for (int64_t i = 0; i <= count; ++i) start[i] = 0;
  for (int64_t pair = 0; pair < pairs; ++pair) ++start[ids[pair] + 1];
  for (int64_t i = 0; i < count; ++i) start[i + 1] += start[i];
  static thread_local std::vector<int32_t> next;
  next.assign(start, start + count);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    place[pair] = next[ids[pair]]++;
    token[place[pair]] = static_cast<int32_t>(pair / top_k);
  }
}

void weighted_sum(const Tensor& values, const Tensor& places, const Tensor& weights, const Tensor& output) {
  require(values.dimensions == 2 && values.dense_after(0), "values must be [rows, size], rows without gaps", values);
  require(output.dimensions == 2 && output.shape[1] == values.shape[1] && output.dense_after(0) && output.dtype == values.dtype,
          "output must be [num_tokens, size] of values' dtype, rows without gaps", output);
  int64_t tokens = output.shape[0], size = output.shape[1];
  require(is_table(places, tokens, DType::int32), "places must be [num_tokens, top_k] int32", places);
  int64_t top_k = places.shape[1];
  require(is_table(weights, tokens, DType::float32) && weights.shape[1] == top_k, "weights must be [num_tokens, top_k] float32", weights);
  auto place = places.as<int32_t>();
  for (int64_t i = 0; i < tokens * top_k; ++i)
    require(place[i] >= 0 && place[i] < values.shape[0], "places must hold numbers from 0 to values' rows - 1");
  const auto& kernel = kernels_for(values.dtype);
  int64_t row_bytes = values.strides[0] * size_of(values.dtype), output_bytes = output.strides[0] * size_of(output.dtype);
  nb::gil_scoped_release release;
  parallel_ranges(tokens, kElementsPerThread / (size * top_k + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token)
      kernel.weighted_sum(
          values.as<char>(), row_bytes, place + token * top_k, weights.as<float>() + token * top_k, top_k, size,
          output.as<char>() + token * output_bytes);
  });
}

}  // namespace

void bind_mixture(nb::module_& module) {
  module.def(
      "choose_experts", choose_experts, nb::arg("logits"), nb::arg("among_chosen"), nb::arg("weights"), nb::arg("experts"));
  module.def(
      "group_by_expert", group_by_expert, nb::arg("experts"), nb::arg("starts"), nb::arg("tokens"), nb::arg("places"));
  module.def(
      "weighted_sum", weighted_sum, nb::arg("values"), nb::arg("places"), nb::arg("weights"), nb::arg("output"));
}

}  // namespace radixrt
