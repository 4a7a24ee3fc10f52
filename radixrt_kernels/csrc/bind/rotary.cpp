// Python binding of rotary position embedding of queries and keys.
#include "kernels/rotary.hpp"

#include "bind/bind.hpp"
#include "isa.hpp"
#include "tensor.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace radixrt {

namespace {

constexpr int64_t kElementsPerThread = 32768;  // some microseconds of work

RotaryKernels::Heads heads_kernel(DType dtype, bool neighbours) {
  const auto& table = kernels<RotaryKernels>();
  switch (dtype) {
    case DType::float32: return neighbours ? table.float32_neighbours : table.float32;
    case DType::bfloat16: return neighbours ? table.bfloat16_neighbours : table.bfloat16;
    case DType::float16: return neighbours ? table.float16_neighbours : table.float16;
    default: throw nb::type_error("query and key must be float32, bfloat16 or float16");
  }
}

void rotate(const Tensor& positions, const Tensor& query, const Tensor& key, const Tensor& cos_sin, bool neighbours) {
  require(positions.dimensions == 1 && positions.dtype == DType::int64 && positions.dense(), "positions must be int64[num_tokens]",
          positions);
  require(cos_sin.dimensions == 2 && cos_sin.dtype == DType::float32 && cos_sin.dense() && cos_sin.shape[1] % 2 == 0,
          "cos_sin must be float32[context_length, rotary_dim] of an even rotary_dim", cos_sin);
  const int64_t tokens = positions.shape[0], rotary_dim = cos_sin.shape[1];
  for (const Tensor* states : {&query, &key})
    require(states->dimensions == 3 && states->shape[0] == tokens && states->shape[2] >= rotary_dim && states->dense_after(1) &&
                states->dtype == query.dtype,
            "query and key must be [num_tokens, heads, head_dim] of one dtype, heads without gaps in them and no smaller than "
            "rotary_dim",
            *states);
  const int64_t* position = positions.as<int64_t>();
  for (int64_t token = 0; token < tokens; ++token)
    require(position[token] >= 0 && position[token] < cos_sin.shape[0], "positions must be in 0..context_length-1 of cos_sin");
  const auto kernel = heads_kernel(query.dtype, neighbours);
  const int64_t bytes = size_of(query.dtype);
  nb::gil_scoped_release release;
  parallel_ranges(tokens, kElementsPerThread / ((query.shape[1] + key.shape[1]) * rotary_dim + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token)
      for (const Tensor* states : {&query, &key})
        kernel(states->as<char>() + token * states->strides[0] * bytes, states->shape[1], states->strides[1], rotary_dim / 2,
               cos_sin.as<float>() + position[token] * rotary_dim);
  });
}

}  // namespace

void bind_rotary(nb::module_& module) {
  module.def("rotate", rotate, nb::arg("positions"), nb::arg("query"), nb::arg("key"), nb::arg("cos_sin"),
             nb::arg("neighbours"));
}

}  // namespace radixrt
