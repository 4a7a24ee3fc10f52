// Python binding of the sampler: the next token of each row of logits.
#include "kernels/sampler.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "bind/bind.hpp"
#include "bind/scratch.hpp"
#include "isa.hpp"
#include "tensor.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace radixrt {

namespace {

uint64_t mixed(uint64_t bits) {  // splitmix64's
  bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
  bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
  return bits ^ bits >> 31;
}

template <class T>
T value_of(int32_t bits) {
  T value;
  static_assert(sizeof value == sizeof bits);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Columns of `settings`: temperature (float32, 0: greedy), top_k, top_p, log_min_p (float32) and the seed's key, low half first.
constexpr int kSettings = 6;

SampledRow with_settings(const int32_t* settings, int64_t position) {
  SampledRow row{};
  row.temperature = value_of<float>(settings[0]);
  row.greedy = row.temperature == 0;
  row.top_k = settings[1];
  row.top_p = value_of<float>(settings[2]);
  row.log_min_p = value_of<float>(settings[3]);
  uint64_t seed_key = value_of<uint32_t>(settings[4]) | uint64_t{value_of<uint32_t>(settings[5])} << 32;
  row.noise_key = mixed(static_cast<uint64_t>(position) * 0x9E3779B97F4A7C15u + seed_key);
  return row;
}

// For each row of logits its row of `allowed`, or -1.
std::vector<int64_t> masks_of_rows(const Tensor& logits, const Tensor& mask_rows, const Tensor& allowed) {
  require(mask_rows.dimensions == 1 && mask_rows.dtype == DType::int64 && mask_rows.dense(), "mask_rows must be [n] int64", mask_rows);
  require(allowed.dimensions == 2 && allowed.shape[0] == mask_rows.shape[0] && allowed.dtype == DType::int32 && allowed.dense() &&
              32 * allowed.shape[1] >= logits.shape[1],
          "allowed must be [n, ceil(vocab / 32)] int32", allowed);
  std::vector<int64_t> mask_of(logits.shape[0], -1);
  for (int64_t i = 0; i < mask_rows.shape[0]; ++i) {
    int64_t row = mask_rows.as<int64_t>()[i];
    require(row >= 0 && row < logits.shape[0], "mask_rows must hold rows of logits");
    mask_of[row] = i;
  }
  return mask_of;
}

void sample(
    const Tensor& logits, const Tensor& settings, const Tensor& positions, const std::optional<std::pair<Tensor, Tensor>>& mask,
    const Tensor& token_ids, const Tensor& peaks) {
  require(logits.dimensions == 2 && logits.dtype == DType::float32 && logits.dense_after(0) && logits.shape[1] > 0 &&
              logits.shape[1] < (int64_t{1} << 31),
          "logits must be [rows, vocab] float32, rows without gaps", logits);
  int64_t rows = logits.shape[0], vocab = logits.shape[1];
  require(settings.dimensions == 2 && settings.shape[0] == rows && settings.shape[1] == kSettings && settings.dtype == DType::int32 &&
              settings.dense(),
          "settings must be [rows, 6] int32", settings);
  auto is_column = [&](const Tensor& column, DType dtype) {
    return column.dimensions == 1 && column.shape[0] == rows && column.dtype == dtype && column.dense();
  };
  require(is_column(positions, DType::int64), "positions must be [rows] int64", positions);
  require(is_column(token_ids, DType::int64), "token_ids must be [rows] int64", token_ids);
  require(is_column(peaks, DType::float32), "peaks must be [rows] float32", peaks);
  for (int64_t row = 0; row < rows; ++row) {
    require(settings.as<int32_t>()[row * kSettings + 1] >= 1, "top_k must be at least 1");
    require(value_of<float>(settings.as<int32_t>()[row * kSettings]) >= 0, "the temperature must not be negative");
  }
  std::vector<int64_t> mask_of(rows, -1);
  if (mask) mask_of = masks_of_rows(logits, mask->first, mask->second);
  const auto& kernel = kernels<SamplerKernels>();
  int64_t scratch_bytes = 4 * kernel.scratch_floats(vocab);
  nb::gil_scoped_release release;
  parallel_for(rows, [&](int64_t row, int) {
    SampledRow one = with_settings(settings.as<int32_t>() + row * kSettings, positions.as<int64_t>()[row]);
    one.logits = logits.as<float>() + row * logits.strides[0];
    one.vocab = vocab;
    if (mask_of[row] >= 0) one.allowed = mask->second.as<uint32_t>() + mask_of[row] * mask->second.shape[1];
    auto memory = reinterpret_cast<float*>(scratch(scratch_bytes));
    token_ids.as<int64_t>()[row] = kernel.sample(one, memory, peaks.as<float>() + row);
  });
}

void log_sum_exp(const Tensor& logits, const Tensor& output) {
  require(logits.dimensions == 2 && logits.dtype == DType::float32 && logits.dense_after(0) && logits.shape[1] > 0,
          "logits must be [rows, vocab] float32, rows without gaps", logits);
  require(output.dimensions == 1 && output.shape[0] == logits.shape[0] && output.dtype == DType::float32 && output.dense(),
          "output must be [rows] float32", output);
  const auto& kernel = kernels<SamplerKernels>();
  nb::gil_scoped_release release;
  parallel_for(logits.shape[0], [&](int64_t row, int) {
    output.as<float>()[row] = kernel.log_sum_exp(logits.as<float>() + row * logits.strides[0], logits.shape[1]);
  });
}

void log_kept_mass(const Tensor& logits, const Tensor& rows, const Tensor& allowed, const Tensor& output) {
  require(logits.dimensions == 2 && logits.dtype == DType::float32 && logits.dense_after(0) && logits.shape[1] > 0,
          "logits must be [rows, vocab] float32, rows without gaps", logits);
  masks_of_rows(logits, rows, allowed);  // checks them
  int64_t count = rows.shape[0], words = allowed.shape[1];
  require(output.dimensions == 1 && output.shape[0] == count && output.dtype == DType::float32 && output.dense(),
          "output must be [n] float32", output);
  const auto& kernel = kernels<SamplerKernels>();
  nb::gil_scoped_release release;
  parallel_for(count, [&](int64_t i, int) {
    auto row = logits.as<float>() + rows.as<int64_t>()[i] * logits.strides[0];
    output.as<float>()[i] = kernel.log_kept_mass(row, allowed.as<uint32_t>() + i * words, logits.shape[1]);
  });
}

}  // namespace

void bind_sampler(nb::module_& module) {
  module.def(
      "sample", sample, nb::arg("logits"), nb::arg("settings"), nb::arg("positions"), nb::arg("mask").none(), nb::arg("token_ids"),
      nb::arg("peaks"));
  module.def("log_sum_exp", log_sum_exp, nb::arg("logits"), nb::arg("output"));
  module.def("log_kept_mass", log_kept_mass, nb::arg("logits"), nb::arg("rows"), nb::arg("allowed"), nb::arg("output"));
}

}  // namespace radixrt
