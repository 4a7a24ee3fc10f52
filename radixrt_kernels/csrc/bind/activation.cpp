// Python binding of gated activations and the soft cap of logits.
#include "kernels/activation.hpp"

#include <nanobind/stl/optional.h>

#include <optional>

#include "bind/bind.hpp"
#include "isa.hpp"
#include "tensor.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace radixrt {

namespace {

constexpr int64_t kElementsPerThread = 16384;  // some microseconds of work

ActivationKernels::Row row_kernel(DType dtype) {
  const auto& table = kernels<ActivationKernels>();
  switch (dtype) {
    case DType::float32: return table.float32;
    case DType::bfloat16: return table.bfloat16;
    case DType::float16: return table.float16;
    default: throw nb::type_error("gate_up must be float32, bfloat16 or float16");
  }
}

void gated_activation(const Tensor& gate_up, const Tensor& output, Activation activation) {
  require(gate_up.dimensions == 2 && gate_up.dense_after(0), "gate_up must be [num_tokens, 2 * size], rows without gaps", gate_up);
  require(gate_up.shape[1] % 2 == 0, "gate_up must have an even number of columns", gate_up);
  int64_t tokens = gate_up.shape[0], size = gate_up.shape[1] / 2;
  require(output.dimensions == 2 && output.shape[0] == tokens && output.shape[1] == size && output.dense_after(0) &&
              output.dtype == gate_up.dtype,
          "output must be [num_tokens, size] of gate_up's dtype, rows without gaps", output);
  auto kernel = row_kernel(gate_up.dtype);
  int64_t from_stride = gate_up.strides[0] * size_of(gate_up.dtype), to_stride = output.strides[0] * size_of(output.dtype);
  nb::gil_scoped_release release;
  parallel_ranges(tokens, kElementsPerThread / (size + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token)
      kernel(activation, gate_up.as<char>() + token * from_stride, output.as<char>() + token * to_stride, size);
  });
}

ActivationKernels::SigmoidGate sigmoid_kernel(DType dtype) {
  const auto& table = kernels<ActivationKernels>();
  switch (dtype) {
    case DType::float32: return table.sigmoid_float32;
    case DType::bfloat16: return table.sigmoid_bfloat16;
    case DType::float16: return table.sigmoid_float16;
    default: throw nb::type_error("gate must be float32, bfloat16 or float16");
  }
}

void sigmoid_gate(const std::optional<Tensor>& values, const Tensor& gate, const Tensor& output) {
  require(gate.dimensions == 3 && gate.dense_after(1), "gate must be [num_tokens, heads, size or 1], rows without gaps", gate);
  const Tensor& like = values ? *values : output;
  const bool one_gate = gate.shape[2] == 1 && like.dimensions == 3 && like.shape[2] != 1;
  for (const Tensor* t : {&like, &output})
    require(t->dimensions == 3 && t->dtype == gate.dtype && t->shape[0] == gate.shape[0] && t->shape[1] == gate.shape[1] &&
                t->shape[2] == like.shape[2] && t->dense_after(1) && (one_gate || t->shape[2] == gate.shape[2]),
            "values and output must be [num_tokens, heads, size] of gate's dtype, rows without gaps", *t);
  const auto kernel = sigmoid_kernel(gate.dtype);
  const int64_t heads = gate.shape[1], size = like.shape[2];
  nb::gil_scoped_release release;
  parallel_ranges(gate.shape[0] * heads, kElementsPerThread / (size + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      auto at = [&](const Tensor& t) {
        return t.as<char>() + (row / heads * t.strides[0] + row % heads * t.strides[1]) * size_of(t.dtype);
      };
      kernel(values ? at(*values) : nullptr, at(gate), at(output), size, one_gate);
    }
  });
}

void soft_cap(const Tensor& logits, float cap) {
  require(logits.dimensions == 2 && logits.dtype == DType::float32 && logits.dense_after(0), "logits must be [rows, vocab] float32", logits);
  require(cap > 0, "cap must be positive");
  auto kernel = kernels<ActivationKernels>().soft_cap;
  nb::gil_scoped_release release;
  parallel_for(logits.shape[0], [&](int64_t row, int) { kernel(logits.as<float>() + row * logits.strides[0], logits.shape[1], cap); });
}

}  // namespace

void bind_activation(nb::module_& module) {
  nb::enum_<Activation>(module, "Activation")
      .value("silu", Activation::silu)
      .value("gelu_tanh", Activation::gelu_tanh)
      .value("gelu", Activation::gelu)
      .value("clamped_swiglu", Activation::clamped_swiglu);
  module.def("gated_activation", gated_activation, nb::arg("gate_up"), nb::arg("output"), nb::arg("activation"));
  module.def("sigmoid_gate", sigmoid_gate, nb::arg("values").none(), nb::arg("gate"), nb::arg("output"));
  module.def("soft_cap", soft_cap, nb::arg("logits"), nb::arg("cap"));
}

}  // namespace radixrt
