// Python binding of RMSNorm over the rows of a tensor.
#include "kernels/norm.hpp"

#include <nanobind/stl/optional.h>

#include <optional>

#include "bind/bind.hpp"
#include "isa.hpp"
#include "tensor.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace radixrt {

namespace {

constexpr int64_t kElementsPerThread = 32768;  // some microseconds of work

NormKernels::Row row_kernel(DType dtype) {
  const auto& table = kernels<NormKernels>();
  switch (dtype) {
    case DType::float32: return table.float32;
    case DType::bfloat16: return table.bfloat16;
    case DType::float16: return table.float16;
    default: throw nb::type_error("hidden must be float32, bfloat16 or float16");
  }
}

// Rows of a tensor with two or three dimensions; the last one is dense.
struct Rows {
  char* data;
  int64_t inner;  // rows in each index of the first dimension
  int64_t outer_bytes, inner_bytes;

  explicit Rows(const Tensor& t)
      : data(t.as<char>()),
        inner(t.dimensions == 3 ? t.shape[1] : 1),
        outer_bytes(t.strides[0] * size_of(t.dtype)),
        inner_bytes(t.dimensions == 3 ? t.strides[1] * size_of(t.dtype) : 0) {}

  char* at(int64_t row) const { return data + row / inner * outer_bytes + row % inner * inner_bytes; }
};

bool same_shape(const Tensor& a, const Tensor& b) {
  if (a.dimensions != b.dimensions || a.dtype != b.dtype) return false;
  for (int i = 0; i < a.dimensions; ++i)
    if (a.shape[i] != b.shape[i]) return false;
  return b.dense_after(b.dimensions - 2);
}

void rms_norm(const Tensor& hidden, const std::optional<Tensor>& residual, const Tensor& weight, const Tensor& output, float eps,
              bool unit_offset) {
  require((hidden.dimensions == 2 || hidden.dimensions == 3) && hidden.dense_after(hidden.dimensions - 2),
          "hidden must be [num_tokens, size] or [num_tokens, heads, size], rows without gaps", hidden);
  const int64_t size = hidden.shape[hidden.dimensions - 1];
  require(weight.dimensions == 1 && weight.shape[0] == size && weight.dense() && weight.dtype == hidden.dtype,
          "weight must be [size] of hidden's dtype", weight);
  require(same_shape(hidden, output), "output must be like hidden, rows without gaps", output);
  if (residual) require(same_shape(hidden, *residual), "residual must be like hidden, rows without gaps", *residual);
  const auto kernel = row_kernel(hidden.dtype);
  const Rows from(hidden), aside(residual ? *residual : hidden), to(output);
  const int64_t rows = size ? hidden.elements() / size : 0;
  nb::gil_scoped_release release;
  parallel_ranges(rows, kElementsPerThread / (size + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      kernel(from.at(row), residual ? aside.at(row) : nullptr, weight.data, to.at(row), size, eps, unit_offset);
  });
}

}  // namespace

void bind_norm(nb::module_& module) {
  module.def("rms_norm", rms_norm, nb::arg("hidden"), nb::arg("residual").none(), nb::arg("weight"), nb::arg("output"), nb::arg("eps"),
             nb::arg("unit_offset"));
}

}  // namespace radixrt
