// Python binding of linear layers with packed weights.
#include "kernels/linear.hpp"

#include <nanobind/stl/optional.h>

#include <optional>
#include <vector>

#include "bind/bind.hpp"
#include "bind/groups.hpp"
#include "bind/units.hpp"
#include "isa.hpp"
#include "tensor.hpp"

namespace nb = nanobind;

namespace radixrt {

namespace {

constexpr int64_t kElementsPerThread = 65536;  // copied in some microseconds

const LinearKernels::Of& kernels_for(DType dtype) {
  const auto& table = kernels<LinearKernels>();
  switch (dtype) {
    case DType::float32: return table.float32;
    case DType::bfloat16: return table.bfloat16;
    case DType::float16: return table.float16;
    default: throw nb::type_error("the weights must be float32, bfloat16 or float16");
  }
}

void check_packed(const Tensor& weights, int64_t rows, int64_t columns, int64_t matrices = 1) {
  int64_t elements = matrices * panels_of(rows) * kPanel * (weights.dtype == DType::bfloat16 ? (columns + 1) / 2 * 2 : columns);
  require(rows > 0 && columns > 0 && weights.dense() && weights.elements() == elements,
          "weights must be the packed form of a matrix of `rows` times hidden's columns", weights);
}

void linear(
    const Tensor& hidden, const Tensor& weights, int64_t rows, const std::optional<Tensor>& bias, const Tensor& output) {
  require(hidden.dimensions == 2 && hidden.dense_after(0), "hidden must be [num_tokens, columns], rows without gaps", hidden);
  require(hidden.dtype == weights.dtype, "hidden must be of the weights' dtype", hidden);
  int64_t tokens = hidden.shape[0], columns = hidden.shape[1];
  check_packed(weights, rows, columns);
  require(output.dimensions == 2 && output.shape[0] == tokens && output.shape[1] == rows && output.dense_after(0) &&
              (output.dtype == weights.dtype || output.dtype == DType::float32),
          "output must be [num_tokens, rows] of the weights' dtype or float32, rows without gaps", output);
  if (bias)
    require(bias->dimensions == 1 && bias->shape[0] == rows && bias->dense() && bias->dtype == weights.dtype,
            "bias must be [rows] of the weights' dtype", *bias);
  const auto& kernel = kernels_for(weights.dtype);
  int size = size_of(weights.dtype);
  int64_t hidden_bytes = hidden.strides[0] * size;
  Linear product{
      weights.as<char>(), rows, columns, bias ? bias->data : nullptr, hidden.as<char>(), hidden_bytes, output.as<char>(),
      output.strides[0] * size_of(output.dtype), output.dtype == weights.dtype};
  if (tokens == 0) return;
  nb::gil_scoped_release release;
  if (int64_t bytes = kernel.prepared_bytes(columns)) {
    product.hidden_bytes = bytes;
    product.hidden = prepare_rows(tokens, nullptr, tokens, bytes, kElementsPerThread / columns + 1, [&](int64_t token, char* to) {
      kernel.prepare(hidden.as<char>() + token * hidden_bytes, columns, to);
    });
  }
  for_each_unit(rows, tokens, columns * kPanel * size, [&](int64_t panel, int panels, int64_t token, int count) {
    kernel.multiply(product, panel, panels, token, count);
  });
}

void grouped_linear(
    const Tensor& hidden, const std::optional<Tensor>& tokens, const Tensor& starts, const Tensor& weights, int64_t rows,
    const Tensor& output, const std::optional<Tensor>& bias) {
  require(hidden.dimensions == 2 && hidden.dense_after(0), "hidden must be [num_tokens, columns], rows without gaps", hidden);
  require(hidden.dtype == weights.dtype, "hidden must be of the weights' dtype", hidden);
  int64_t columns = hidden.shape[1];
  const int32_t* chosen = chosen_tokens(tokens, hidden.shape[0]);
  Groups groups = groups_of(starts, tokens ? tokens->shape[0] : hidden.shape[0]);
  check_packed(weights, rows, columns, groups.count);
  require(output.dimensions == 2 && output.shape[0] == groups.rows && output.shape[1] == rows && output.dense_after(0) &&
              output.dtype == weights.dtype,
          "output must be [rows of tokens, rows] of the weights' dtype, rows without gaps", output);
  const auto& kernel = kernels_for(weights.dtype);
  int size = size_of(weights.dtype);
  int64_t hidden_bytes = hidden.strides[0] * size, matrix_bytes = weights.elements() / groups.count * size;
  Linear product{
      nullptr, rows, columns, nullptr, hidden.as<char>(), hidden_bytes, output.as<char>(), output.strides[0] * size};
  const char* biases = biases_of(bias, groups, rows, hidden.dtype);
  if (groups.rows == 0) return;
  nb::gil_scoped_release release;
  int64_t bytes = kernel.prepared_bytes(columns);
  if (chosen || bytes > 0) {
    product.hidden_bytes = bytes > 0 ? bytes : (columns * size + 63) / 64 * 64;
    product.hidden = prepare_rows(
        hidden.shape[0], chosen, groups.rows, product.hidden_bytes, kElementsPerThread / columns + 1, [&](int64_t token, char* to) {
          const char* from = hidden.as<char>() + token * hidden_bytes;
          bytes > 0 ? kernel.prepare(from, columns, to) : static_cast<void>(memcpy(to, from, columns * size));
        });
  }
  for_each_group_unit(groups, rows, columns * kPanel * size, [&](int64_t matrix, int64_t panel, int panels, int64_t row, int count) {
    Linear own = product;
    own.weights = weights.as<char>() + matrix * matrix_bytes;
    own.bias = biases ? biases + matrix * rows * size : nullptr;
    kernel.multiply(own, panel, panels, row, count);
  });
}

// Adds to the outputs of tokens what low-rank adapters make of their inputs: output[token] += up (down hidden[token]), with the two
// matrices of the token's adapter. An output has parts, projections of the same input; each has a `down` of its own, `rank` rows of the
// merged one. What is between the two products stays in float32, so an output is rounded once.
void add_lora(
    const Tensor& hidden, const Tensor& tokens, const Tensor& starts, const Tensor& down, const Tensor& up, int64_t rank,
    const Tensor& ranks, const Tensor& widths, const Tensor& output) {
  require(hidden.dimensions == 2 && hidden.dense_after(0), "hidden must be [num_tokens, columns], rows without gaps", hidden);
  require(hidden.dtype == down.dtype && up.dtype == down.dtype && output.dtype == down.dtype, "all tensors must be of one dtype", hidden);
  require(ranks.dimensions == 2 && ranks.dense() && ranks.dtype == DType::int32, "ranks must be [adapters, parts] int32", ranks);
  const int64_t columns = hidden.shape[1], adapters = ranks.shape[0], parts = ranks.shape[1], merged = parts * rank;
  require(widths.dimensions == 1 && widths.dense() && widths.dtype == DType::int32 && widths.shape[0] == parts,
          "widths must be [parts] int32", widths);
  require(starts.dimensions == 1 && starts.dense() && starts.dtype == DType::int32 && starts.shape[0] > adapters,
          "starts must be int32 with more elements than adapters", starts);
  const int32_t* chosen = chosen_tokens(tokens, hidden.shape[0]);
  const Groups groups{starts.as<int32_t>(), adapters, starts.as<int32_t>()[adapters]};
  require(groups.starts[0] == 0 && groups.rows <= tokens.shape[0], "starts must begin with 0 and end within the tokens");
  for (int64_t i = 0; i < adapters; ++i) require(groups.starts[i] <= groups.starts[i + 1], "starts must not descend");
  std::vector<int64_t> first_panel(parts + 1), first_output(parts + 1);
  for (int64_t part = 0; part < parts; ++part) {
    const int32_t width = widths.as<int32_t>()[part];
    require(width > 0, "widths must be positive");
    first_panel[part + 1] = first_panel[part] + panels_of(width);
    first_output[part + 1] = first_output[part] + width;
  }
  const int64_t panels = first_panel[parts];
  check_packed(down, merged, columns, adapters);
  require(up.dense() && up.elements() == adapters * panels * rank * kPanel, "up must be [adapters, panels, rank, 16]", up);
  require(output.dimensions == 2 && output.shape[0] == hidden.shape[0] && output.shape[1] == first_output[parts] && output.dense_after(0),
          "output must be [num_tokens, sum of widths], rows without gaps", output);
  if (groups.rows == 0) return;
  const auto& kernel = kernels_for(down.dtype);
  const auto& by_float = down.dtype == DType::bfloat16 ? kernels<LinearKernels>().bfloat16_by_float : kernel;
  const int64_t size = size_of(down.dtype), hidden_bytes = hidden.strides[0] * size, prepared = kernel.prepared_bytes(columns);
  nb::gil_scoped_release release;
  static thread_local std::vector<float> between_memory;
  between_memory.resize(groups.rows * merged);
  char* between = reinterpret_cast<char*>(between_memory.data());
  Linear shrink{nullptr, merged, columns, nullptr, nullptr, prepared > 0 ? prepared : (columns * size + 63) / 64 * 64, between,
                merged * static_cast<int64_t>(sizeof(float)), false};
  shrink.hidden = prepare_rows(groups.rows, nullptr, groups.rows, shrink.hidden_bytes, kElementsPerThread / columns + 1,
                               [&](int64_t row, char* to) {
    const char* from = hidden.as<char>() + chosen[row] * hidden_bytes;
    prepared > 0 ? kernel.prepare(from, columns, to) : static_cast<void>(memcpy(to, from, columns * size));
  });
  const int64_t down_bytes = down.elements() / adapters * size, panel_bytes = rank * kPanel * size;
  for_each_group_unit(groups, merged, columns * kPanel * size, [&](int64_t adapter, int64_t panel, int count, int64_t row, int rows) {
    Linear own = shrink;
    own.weights = down.as<char>() + adapter * down_bytes;
    kernel.multiply(own, panel, count, row, rows);
  });
  for_each_group_unit(groups, panels * kPanel, panel_bytes, [&](int64_t adapter, int64_t panel, int count, int64_t row, int rows) {
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = panel > first_panel[part] ? panel : first_panel[part];
      const int64_t end = panel + count < first_panel[part + 1] ? panel + count : first_panel[part + 1];
      if (begin >= end || ranks.as<int32_t>()[adapter * parts + part] == 0) continue;
      Linear own{up.as<char>() + (adapter * panels + first_panel[part]) * panel_bytes, widths.as<int32_t>()[part], rank, nullptr,
                 between + part * rank * sizeof(float), shrink.output_bytes, output.as<char>() + first_output[part] * size,
                 output.strides[0] * size, true, true, chosen};
      by_float.multiply(own, begin - first_panel[part], static_cast<int>(end - begin), row, rows);
    }
  });
}

// Each head of each token times the head's own matrix.
void linear_by_head(const Tensor& hidden, const Tensor& weights, int64_t rows, const Tensor& output) {
  require(hidden.dimensions == 3 && hidden.dense_after(1), "hidden must be [num_tokens, heads, columns], heads without gaps in them", hidden);
  require(hidden.dtype == weights.dtype, "hidden must be of the weights' dtype", hidden);
  const int64_t tokens = hidden.shape[0], heads = hidden.shape[1], columns = hidden.shape[2];
  check_packed(weights, rows, columns, heads);
  require(output.dimensions == 3 && output.shape[0] == tokens && output.shape[1] == heads && output.shape[2] == rows &&
              output.dense_after(1) && output.dtype == weights.dtype,
          "output must be [num_tokens, heads, rows] of the weights' dtype, heads without gaps in them", output);
  if (tokens == 0) return;
  const auto& kernel = kernels_for(weights.dtype);
  const int64_t size = size_of(weights.dtype), matrix_bytes = weights.elements() / heads * size, bytes = kernel.prepared_bytes(columns);
  std::vector<int32_t> starts(heads + 1);
  for (int64_t head = 0; head <= heads; ++head) starts[head] = static_cast<int32_t>(head * tokens);
  auto hidden_of = [&](int64_t head, int64_t token) {
    return hidden.as<char>() + (head * hidden.strides[1] + token * hidden.strides[0]) * size;
  };
  nb::gil_scoped_release release;
  const char* prepared = nullptr;
  if (bytes > 0)
    prepared = prepare_rows(heads * tokens, nullptr, heads * tokens, bytes, kElementsPerThread / columns + 1, [&](int64_t row, char* to) {
      kernel.prepare(hidden_of(row / tokens, row % tokens), columns, to);
    });
  for_each_group_unit({starts.data(), heads, heads * tokens}, rows, columns * kPanel * size,
                      [&](int64_t head, int64_t panel, int panels, int64_t row, int count) {
    const char* own = prepared ? prepared + head * tokens * bytes : hidden_of(head, 0);
    Linear product{
        weights.as<char>() + head * matrix_bytes, rows, columns, nullptr, own, prepared ? bytes : hidden.strides[0] * size,
        output.as<char>() + head * output.strides[1] * size, output.strides[0] * size};
    kernel.multiply(product, panel, panels, row - head * tokens, count);
  });
}

void look_up(const Tensor& weights, int64_t rows, const Tensor& wanted, const Tensor& output) {
  require(wanted.dimensions == 1 && wanted.dense() && wanted.dtype == DType::int64, "wanted must be [n] int64", wanted);
  require(output.dimensions == 2 && output.shape[0] == wanted.shape[0] && output.dense_after(0) && output.dtype == weights.dtype,
          "output must be [n, columns] of the weights' dtype, rows without gaps", output);
  int64_t columns = output.shape[1], count = wanted.shape[0];
  check_packed(weights, rows, columns);
  auto ids = wanted.as<int64_t>();
  for (int64_t i = 0; i < count; ++i) require(ids[i] >= 0 && ids[i] < rows, "wanted must hold numbers from 0 to rows - 1");
  const auto& kernel = kernels_for(weights.dtype);
  int64_t output_bytes = output.strides[0] * size_of(output.dtype);
  nb::gil_scoped_release release;
  parallel_ranges(count, kElementsPerThread / 16 / columns + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      kernel.look_up(weights.as<char>(), columns, ids[i], output.as<char>() + i * output_bytes);
  });
}

}  // namespace

void bind_linear(nb::module_& module) {
  module.attr("PANEL") = kPanel;
  module.def(
      "linear", linear, nb::arg("hidden"), nb::arg("weights"), nb::arg("rows"), nb::arg("bias").none(), nb::arg("output"));
  module.def(
      "grouped_linear", grouped_linear, nb::arg("hidden"), nb::arg("tokens").none(), nb::arg("starts"), nb::arg("weights"),
      nb::arg("rows"), nb::arg("output"), nb::arg("bias") = nb::none());
  module.def(
      "add_lora", add_lora, nb::arg("hidden"), nb::arg("tokens"), nb::arg("starts"), nb::arg("down"), nb::arg("up"), nb::arg("rank"),
      nb::arg("ranks"), nb::arg("widths"), nb::arg("output"));
  module.def("linear_by_head", linear_by_head, nb::arg("hidden"), nb::arg("weights"), nb::arg("rows"), nb::arg("output"));
  module.def("look_up", look_up, nb::arg("weights"), nb::arg("rows"), nb::arg("wanted"), nb::arg("output"));
}

}  // namespace radixrt
