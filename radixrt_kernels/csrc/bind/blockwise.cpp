// Python binding of linear layers with the blocks of GGUF files.
#include "kernels/blockwise.hpp"

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

constexpr int64_t kRoundedPerThread = 16384;  // activations, in some microseconds
constexpr int64_t kDecodedPerThread = 1024;

const BlockwiseKernels::Of& kernels_for(DType dtype) {
  const auto& table = kernels<BlockwiseKernels>();
  switch (dtype) {
    case DType::float32: return table.float32;
    case DType::bfloat16: return table.bfloat16;
    case DType::float16: return table.float16;
    default: throw nb::type_error("hidden states must be float32, bfloat16 or float16");
  }
}

const BlockForm& form_of(int kind, int64_t columns) {
  const BlockForm& form = block_form(kind);
  require(columns > 0 && columns % form.columns == 0, "columns must be whole blocks");
  return form;
}

Blockwise matrix_of(const Tensor& packed, int kind, int64_t rows, int64_t columns, int64_t matrices = 1) {
  const BlockForm& form = form_of(kind, columns);
  require(rows > 0, "rows must be positive");
  Blockwise matrix{};
  matrix.form = &form;
  matrix.rows = rows;
  matrix.columns = columns;
  matrix.panel_bytes = form.panel_bytes(columns);
  require(packed.dtype == DType::uint8 && packed.dense() && packed.elements() == matrices * panels_of(rows) * matrix.panel_bytes,
          "packed must be the packed form of `rows` times `columns` weights", packed);
  matrix.panels = packed.as<uint8_t>();
  return matrix;
}

void pack(const Tensor& blocks, int kind, int64_t columns, const Tensor& packed) {
  const BlockForm& form = form_of(kind, columns);
  int64_t panel_bytes = form.panel_bytes(columns);
  require(blocks.dimensions == 2 && blocks.dtype == DType::uint8 && blocks.dense_after(0) &&
              blocks.shape[1] == columns / form.columns * form.file_bytes,
          "blocks must be uint8 [rows, bytes of a row], rows without gaps", blocks);
  int64_t rows = blocks.shape[0];
  require(packed.dimensions == 2 && packed.dtype == DType::uint8 && packed.dense() && packed.shape[0] >= panels_of(rows) &&
              packed.shape[1] == panel_bytes,
          "packed must be uint8 [panels, bytes of a panel]", packed);
  nb::gil_scoped_release release;
  parallel_ranges(panels_of(rows), 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * kPanel; row < end * kPanel && row < rows; ++row)
      pack_row(
          form, blocks.as<uint8_t>() + row * blocks.strides[0], columns, static_cast<int>(row % kPanel),
          packed.as<uint8_t>() + row / kPanel * panel_bytes);
  });
}

// Calls `body(matrix, first_panel, panels, first_token, tokens)` for each unit of matrices with the same inputs.
template <class Body>
void for_each_part_unit(const std::vector<Blockwise>& parts, int64_t tokens, Body&& body) {
  struct Unit {
    const Blockwise* matrix;
    int32_t panel, panels, token, tokens;
  };
  static thread_local std::vector<Unit> units;
  units.clear();
  int64_t panels = 0, token_units = (tokens + kUnitTokens - 1) / kUnitTokens;
  for (const Blockwise& part : parts) panels += panels_of(part.rows);
  for (const Blockwise& part : parts) {
    int64_t own = panels_of(part.rows), size = panels_a_unit(panels, tokens, part.panel_bytes);
    for (int64_t panel = 0; panel < own; panel += size) {
      for (int64_t unit = 0; unit < token_units; ++unit) {
        int64_t begin = tokens * unit / token_units, end = tokens * (unit + 1) / token_units;
        units.push_back(
            {&part, static_cast<int32_t>(panel), static_cast<int32_t>(own - panel < size ? own - panel : size),
             static_cast<int32_t>(begin), static_cast<int32_t>(end - begin)});
      }
    }
  }
  const Unit* all = units.data();  // `units` is thread-local, so the other threads need this pointer
  parallel_for(static_cast<int64_t>(units.size()), [all, &body](int64_t index, int) {
    const Unit& unit = all[index];
    body(*unit.matrix, unit.panel, unit.panels, unit.token, unit.tokens);
  });
}

// `matrices`: tuples (packed, kind, rows), the output features one after the other.
void blockwise_linear(const Tensor& hidden, const nb::tuple& matrices, const std::optional<Tensor>& bias, const Tensor& output) {
  require(hidden.dimensions == 2 && hidden.dense_after(0), "hidden must be [num_tokens, columns], rows without gaps", hidden);
  int64_t tokens = hidden.shape[0], columns = hidden.shape[1], rows = 0;
  static thread_local std::vector<Blockwise> parts;
  parts.clear();
  for (nb::handle item : matrices) {
    require(nb::isinstance<nb::tuple>(item) && nb::len(item) == 3, "matrices must be tuples (packed, kind, rows)");
    auto part = nb::borrow<nb::tuple>(item);
    Tensor packed = tensor_of(part[0]);
    parts.push_back(matrix_of(packed, nb::cast<int>(part[1]), nb::cast<int64_t>(part[2]), columns));
    rows += parts.back().rows;
  }
  require(output.dimensions == 2 && output.shape[0] == tokens && output.shape[1] == rows && output.dense_after(0) &&
              (output.dtype == hidden.dtype || (output.dtype == DType::float32 && !bias)),
          "output must be [num_tokens, rows of all matrices] of hidden's dtype, or of float32 if there is no bias, rows without gaps", output);
  if (bias)
    require(bias->dimensions == 1 && bias->shape[0] == rows && bias->dense() && bias->dtype == hidden.dtype,
            "bias must be [rows of all matrices] of hidden's dtype", *bias);
  const auto& kernel = kernels_for(hidden.dtype);
  if (tokens == 0 || rows == 0) return;
  int size = size_of(output.dtype);
  int64_t hidden_bytes = hidden.strides[0] * size_of(hidden.dtype), input_bytes = kernels<BlockwiseKernels>().prepared_bytes(columns);
  nb::gil_scoped_release release;
  const char* inputs = prepare_rows(tokens, nullptr, tokens, input_bytes, kRoundedPerThread / columns + 1, [&](int64_t token, char* to) {
    kernel.prepare(hidden.as<char>() + token * hidden_bytes, columns, to);
  });
  int64_t first = 0;  // row of the output
  for (Blockwise& part : parts) {
    part.inputs = inputs;
    part.input_bytes = input_bytes;
    part.bias = bias ? bias->as<char>() + first * size : nullptr;
    part.output = output.as<char>() + first * size;
    part.output_bytes = output.strides[0] * size;
    first += part.rows;
  }
  for_each_part_unit(parts, tokens, kernels_for(output.dtype).multiply);
}

void grouped_blockwise_linear(
    const Tensor& hidden, const std::optional<Tensor>& tokens, const Tensor& starts, const Tensor& packed, int kind, int64_t rows,
    const Tensor& output, const std::optional<Tensor>& bias) {
  require(hidden.dimensions == 2 && hidden.dense_after(0), "hidden must be [num_tokens, columns], rows without gaps", hidden);
  const int32_t* chosen = chosen_tokens(tokens, hidden.shape[0]);
  Groups groups = groups_of(starts, tokens ? tokens->shape[0] : hidden.shape[0]);
  Blockwise stack = matrix_of(packed, kind, rows, hidden.shape[1], groups.count);
  require(output.dimensions == 2 && output.shape[0] == groups.rows && output.shape[1] == rows && output.dense_after(0) &&
              output.dtype == hidden.dtype,
          "output must be [rows of tokens, rows] of hidden's dtype, rows without gaps", output);
  const char* biases = biases_of(bias, groups, rows, hidden.dtype);
  const auto& kernel = kernels_for(hidden.dtype);
  if (groups.rows == 0) return;
  int size = size_of(hidden.dtype);
  int64_t hidden_bytes = hidden.strides[0] * size;
  stack.output = output.as<char>();
  stack.output_bytes = output.strides[0] * size;
  stack.input_bytes = kernels<BlockwiseKernels>().prepared_bytes(stack.columns);
  nb::gil_scoped_release release;
  stack.inputs = prepare_rows(
      hidden.shape[0], chosen, groups.rows, stack.input_bytes, kRoundedPerThread / stack.columns + 1, [&](int64_t token, char* to) {
        kernel.prepare(hidden.as<char>() + token * hidden_bytes, stack.columns, to);
      });
  int64_t matrix_bytes = panels_of(rows) * stack.panel_bytes;
  for_each_group_unit(groups, rows, stack.panel_bytes, [&](int64_t matrix, int64_t panel, int panels, int64_t row, int count) {
    Blockwise own = stack;
    own.panels += matrix * matrix_bytes;
    own.bias = biases ? biases + matrix * rows * size : nullptr;
    kernel.multiply(own, panel, panels, row, count);
  });
}

void blockwise_look_up(const Tensor& packed, int kind, int64_t rows, const Tensor& wanted, const Tensor& output) {
  require(wanted.dimensions == 1 && wanted.dense() && wanted.dtype == DType::int64, "wanted must be [n] int64", wanted);
  require(output.dimensions == 2 && output.shape[0] == wanted.shape[0] && output.dense_after(0),
          "output must be [n, columns], rows without gaps", output);
  Blockwise matrix = matrix_of(packed, kind, rows, output.shape[1]);
  auto ids = wanted.as<int64_t>();
  int64_t count = wanted.shape[0];
  for (int64_t i = 0; i < count; ++i) require(ids[i] >= 0 && ids[i] < rows, "wanted must hold numbers from 0 to rows - 1");
  const auto& kernel = kernels_for(output.dtype);
  int64_t output_bytes = output.strides[0] * size_of(output.dtype);
  nb::gil_scoped_release release;
  parallel_ranges(count, kDecodedPerThread / matrix.columns + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) kernel.look_up(matrix, ids[i], output.as<char>() + i * output_bytes);
  });
}

}  // namespace

void bind_blockwise(nb::module_& module) {
  module.def(
      "blockwise_panel_bytes", [](int kind, int64_t columns) { return form_of(kind, columns).panel_bytes(columns); },
      nb::arg("kind"), nb::arg("columns"));
  module.def("blockwise_pack", pack, nb::arg("blocks"), nb::arg("kind"), nb::arg("columns"), nb::arg("packed"));
  module.def(
      "blockwise_linear", blockwise_linear, nb::arg("hidden"), nb::arg("matrices"), nb::arg("bias").none(), nb::arg("output"));
  module.def(
      "grouped_blockwise_linear", grouped_blockwise_linear, nb::arg("hidden"), nb::arg("tokens").none(), nb::arg("starts"),
      nb::arg("packed"), nb::arg("kind"), nb::arg("rows"), nb::arg("output"), nb::arg("bias") = nb::none());
  module.def(
      "blockwise_look_up", blockwise_look_up, nb::arg("packed"), nb::arg("kind"), nb::arg("rows"), nb::arg("wanted"),
      nb::arg("output"));
}

}  // namespace radixrt
