// Python binding of linear layers with 4- or 8-bit weights.
#include "kernels/groupwise.hpp"

#include <nanobind/stl/optional.h>

#include <optional>

#include "bind/bind.hpp"
#include "bind/groups.hpp"
#include "bind/scratch.hpp"
#include "bind/units.hpp"
#include "isa.hpp"
#include "tensor.hpp"

namespace nb = nanobind;

namespace radixrt {

namespace {

constexpr int64_t kRoundedPerThread = 8192;  // activations, in some microseconds
constexpr int64_t kDecodedPerThread = 1024;

const GroupwiseKernels::Of& kernels_for(DType dtype) {
  const auto& table = kernels<GroupwiseKernels>();
  switch (dtype) {
    case DType::float32: return table.float32;
    case DType::bfloat16: return table.bfloat16;
    case DType::float16: return table.float16;
    default: throw nb::type_error("hidden states must be float32, bfloat16 or float16");
  }
}

// The largest chunk that divides a group.
int64_t chunk_of(int64_t group_size, int64_t columns) {
  if (group_size >= columns) return kLongestChunk;
  int64_t chunk = kLongestChunk;
  while (group_size % chunk) chunk /= 2;
  return chunk;
}

Groupwise matrix_of(
    const Tensor& codes, const Tensor& scales, const Tensor& zeros, int64_t rows, int64_t columns, int bits, int64_t group_size,
    int64_t matrices = 1) {
  require(bits == 4 || bits == 8, "bits must be 4 or 8");
  require(rows > 0 && columns > 0, "rows and columns must be positive");
  require(group_size >= columns || (group_size > 0 && group_size % 8 == 0),
          "group_size must be a multiple of 8, or all columns");
  Groupwise matrix{};
  matrix.rows = rows;
  matrix.columns = columns;
  matrix.group_size = group_size;
  matrix.chunk = chunk_of(group_size, columns);
  int64_t outputs = matrices * panels_of(rows) * kPanel;
  require(codes.dtype == DType::uint8 && codes.dense() && codes.elements() == outputs * matrix.steps() * bits,
          "codes must be the packed form of `rows` times `columns` codes", codes);
  require(scales.dtype == DType::float16 && scales.dense() && scales.elements() == outputs * matrix.groups(),
          "scales must be float16 [panels, groups, 16]", scales);
  require(zeros.dtype == DType::uint8 && zeros.dense() && zeros.elements() == outputs * matrix.groups(),
          "zeros must be uint8 [panels, groups, 16]", zeros);
  matrix.codes = codes.as<uint8_t>();
  matrix.scales = scales.as<char>();
  matrix.zeros = zeros.as<uint8_t>();
  return matrix;
}

void groupwise_linear(
    const Tensor& hidden, const Tensor& codes, const Tensor& scales, const Tensor& zeros, int64_t rows, int bits, int64_t group_size,
    const std::optional<Tensor>& bias, const Tensor& output) {
  require(hidden.dimensions == 2 && hidden.dense_after(0), "hidden must be [num_tokens, columns], rows without gaps", hidden);
  int64_t tokens = hidden.shape[0];
  Groupwise matrix = matrix_of(codes, scales, zeros, rows, hidden.shape[1], bits, group_size);
  require(output.dimensions == 2 && output.shape[0] == tokens && output.shape[1] == rows && output.dense_after(0) &&
              (output.dtype == hidden.dtype || (output.dtype == DType::float32 && !bias)),
          "output must be [num_tokens, rows] of hidden's dtype, or of float32 if there is no bias, rows without gaps", output);
  if (bias)
    require(bias->dimensions == 1 && bias->shape[0] == rows && bias->dense() && bias->dtype == hidden.dtype,
            "bias must be [rows] of hidden's dtype", *bias);
  const auto& kernel = kernels_for(hidden.dtype);
  if (tokens == 0) return;
  int64_t hidden_bytes = hidden.strides[0] * size_of(hidden.dtype);
  matrix.bias = bias ? bias->data : nullptr;
  matrix.output = output.as<char>();
  matrix.output_bytes = output.strides[0] * size_of(output.dtype);
  matrix.input_bytes = kernels<GroupwiseKernels>().prepared_bytes(matrix.columns, matrix.chunk);
  nb::gil_scoped_release release;
  matrix.inputs = prepare_rows(
      tokens, nullptr, tokens, matrix.input_bytes, kRoundedPerThread / matrix.columns + 1, [&](int64_t token, char* to) {
        kernel.prepare(hidden.as<char>() + token * hidden_bytes, matrix.columns, matrix.chunk, to);
      });
  const auto& writing = kernels_for(output.dtype);
  auto multiply = bits == 4 ? writing.multiply_4 : writing.multiply_8;
  for_each_unit(rows, tokens, matrix.steps() * bits * kPanel, [&](int64_t panel, int panels, int64_t token, int count) {
    multiply(matrix, panel, panels, token, count);
  });
}

void grouped_groupwise_linear(
    const Tensor& hidden, const std::optional<Tensor>& tokens, const Tensor& starts, const Tensor& codes, const Tensor& scales,
    const Tensor& zeros, int64_t rows, int bits, int64_t group_size, const Tensor& output, const std::optional<Tensor>& bias) {
  require(hidden.dimensions == 2 && hidden.dense_after(0), "hidden must be [num_tokens, columns], rows without gaps", hidden);
  const int32_t* chosen = chosen_tokens(tokens, hidden.shape[0]);
  Groups groups = groups_of(starts, tokens ? tokens->shape[0] : hidden.shape[0]);
  Groupwise stack = matrix_of(codes, scales, zeros, rows, hidden.shape[1], bits, group_size, groups.count);
  require(output.dimensions == 2 && output.shape[0] == groups.rows && output.shape[1] == rows && output.dense_after(0) &&
              output.dtype == hidden.dtype,
          "output must be [rows of tokens, rows] of hidden's dtype, rows without gaps", output);
  const auto& kernel = kernels_for(hidden.dtype);
  const char* biases = biases_of(bias, groups, rows, hidden.dtype);
  if (groups.rows == 0) return;
  int64_t hidden_bytes = hidden.strides[0] * size_of(hidden.dtype);
  stack.output = output.as<char>();
  stack.output_bytes = output.strides[0] * size_of(output.dtype);
  stack.input_bytes = kernels<GroupwiseKernels>().prepared_bytes(stack.columns, stack.chunk);
  nb::gil_scoped_release release;
  stack.inputs = prepare_rows(
      hidden.shape[0], chosen, groups.rows, stack.input_bytes, kRoundedPerThread / stack.columns + 1, [&](int64_t token, char* to) {
        kernel.prepare(hidden.as<char>() + token * hidden_bytes, stack.columns, stack.chunk, to);
      });
  auto multiply = bits == 4 ? kernel.multiply_4 : kernel.multiply_8;
  int64_t panel_bytes = stack.steps() * bits * kPanel, panels_each = panels_of(rows), scales_each = panels_each * stack.groups() * kPanel;
  for_each_group_unit(groups, rows, panel_bytes, [&](int64_t matrix, int64_t panel, int panels, int64_t row, int count) {
    Groupwise own = stack;
    own.codes += matrix * panels_each * panel_bytes;
    own.scales += matrix * scales_each * 2;
    own.zeros += matrix * scales_each;
    own.bias = biases ? biases + matrix * rows * size_of(output.dtype) : nullptr;
    multiply(own, panel, panels, row, count);
  });
}

void groupwise_look_up(
    const Tensor& codes, const Tensor& scales, const Tensor& zeros, int64_t rows, int bits, int64_t group_size, const Tensor& wanted,
    const Tensor& output) {
  require(wanted.dimensions == 1 && wanted.dense() && wanted.dtype == DType::int64, "wanted must be [n] int64", wanted);
  require(output.dimensions == 2 && output.shape[0] == wanted.shape[0] && output.dense_after(0),
          "output must be [n, columns], rows without gaps", output);
  Groupwise matrix = matrix_of(codes, scales, zeros, rows, output.shape[1], bits, group_size);
  auto ids = wanted.as<int64_t>();
  int64_t count = wanted.shape[0];
  for (int64_t i = 0; i < count; ++i) require(ids[i] >= 0 && ids[i] < rows, "wanted must hold numbers from 0 to rows - 1");
  const auto& kernel = kernels_for(output.dtype);
  auto look_up = bits == 4 ? kernel.look_up_4 : kernel.look_up_8;
  int64_t output_bytes = output.strides[0] * size_of(output.dtype);
  nb::gil_scoped_release release;
  parallel_ranges(count, kDecodedPerThread / matrix.columns + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) look_up(matrix, ids[i], output.as<char>() + i * output_bytes);
  });
}

}  // namespace

void bind_groupwise(nb::module_& module) {
  module.def(
      "groupwise_linear", groupwise_linear, nb::arg("hidden"), nb::arg("codes"), nb::arg("scales"), nb::arg("zeros"),
      nb::arg("rows"), nb::arg("bits"), nb::arg("group_size"), nb::arg("bias").none(), nb::arg("output"));
  module.def(
      "grouped_groupwise_linear", grouped_groupwise_linear, nb::arg("hidden"), nb::arg("tokens").none(), nb::arg("starts"),
      nb::arg("codes"), nb::arg("scales"), nb::arg("zeros"), nb::arg("rows"), nb::arg("bits"), nb::arg("group_size"),
      nb::arg("output"), nb::arg("bias") = nb::none());
  module.def(
      "groupwise_look_up", groupwise_look_up, nb::arg("codes"), nb::arg("scales"), nb::arg("zeros"), nb::arg("rows"),
      nb::arg("bits"), nb::arg("group_size"), nb::arg("wanted"), nb::arg("output"));
}

}  // namespace radixrt
