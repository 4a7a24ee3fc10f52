// Python binding of the recurrences: checks a step over the states of sequences, and divides it among threads.
#include "kernels/recurrence.hpp"

#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <vector>

#include "bind/bind.hpp"
#include "bind/scratch.hpp"
#include "isa.hpp"
#include "tensor.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace radixrt {

namespace {

constexpr int64_t kChannelsPerTask = 64;
constexpr int64_t kElementsPerThread = 16384;  // some microseconds of work

const RecurrenceKernels::OfType& kernels_of(DType dtype) {
  const auto& table = kernels<RecurrenceKernels>();
  switch (dtype) {
    case DType::float32: return table.float32;
    case DType::bfloat16: return table.bfloat16;
    case DType::float16: return table.float16;
    default: throw nb::type_error("the inputs of a recurrence must be float32, bfloat16 or float16");
  }
}

// The sequences of a step, longest first.
struct Step {
  const int32_t *indptr, *rows, *keep_indptr, *keep_ends, *keep_rows;
  std::vector<int32_t> order;

  Step(const Tensor& indptr_, const Tensor& rows_, const Tensor& keep_indptr_, const Tensor& keep_ends_, const Tensor& keep_rows_,
       int64_t tokens, int64_t num_rows)
      : indptr(indptr_.as<int32_t>()),
        rows(rows_.as<int32_t>()),
        keep_indptr(keep_indptr_.as<int32_t>()),
        keep_ends(keep_ends_.as<int32_t>()),
        keep_rows(keep_rows_.as<int32_t>()) {
    for (const Tensor* t : {&indptr_, &rows_, &keep_indptr_, &keep_ends_, &keep_rows_})
      require(t->dimensions == 1 && t->dtype == DType::int32 && t->dense(), "a step's tensors must be [n] int32, without gaps", *t);
    const int64_t sequences = rows_.shape[0], keeps = keep_ends_.shape[0];
    require(indptr_.shape[0] == sequences + 1 && keep_indptr_.shape[0] == sequences + 1, "indptr and keep_indptr must be [sequences + 1]");
    require(keep_rows_.shape[0] == keeps, "keep_ends and keep_rows must have one length", keep_rows_);
    require(indptr[0] == 0 && indptr[sequences] == tokens && keep_indptr[0] == 0 && keep_indptr[sequences] == keeps,
            "indptr and keep_indptr must begin at 0 and end at the number of tokens and keeps");
    for (int64_t i = 0; i < sequences; ++i) {
      require(indptr[i] < indptr[i + 1] && keep_indptr[i] <= keep_indptr[i + 1], "each sequence must have tokens, and indptr ascend");
      require(0 <= rows[i] && rows[i] < num_rows, "rows must be those of the states");
      for (int32_t keep = keep_indptr[i], before = indptr[i]; keep < keep_indptr[i + 1]; before = keep_ends[keep++]) {
        require(before < keep_ends[keep] && keep_ends[keep] <= indptr[i + 1], "keep_ends must ascend within the tokens of their sequence");
        require(0 <= keep_rows[keep] && keep_rows[keep] < num_rows, "keep_rows must be those of the states");
      }
    }
    order.resize(sequences);
    std::iota(order.begin(), order.end(), 0);
    auto length = [&](int32_t i) { return indptr[i + 1] - indptr[i]; };
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return length(a) > length(b); });
  }

  Keeps keeps(int32_t i) const {
    return {keep_indptr[i + 1] - keep_indptr[i], keep_ends + keep_indptr[i], keep_rows + keep_indptr[i]};
  }
};

bool is_rows(const Tensor& t, const Tensor& like) {
  return t.dimensions == 2 && t.dtype == like.dtype && t.shape[0] == like.shape[0] && t.shape[1] == like.shape[1] && t.dense_after(0);
}

void short_convolution(const Tensor& inputs, const std::optional<Tensor>& before, const std::optional<Tensor>& after, const Tensor& weight,
                       const std::optional<Tensor>& bias, bool silu, const Tensor& outputs, const Tensor& states, const Tensor& indptr,
                       const Tensor& rows, const Tensor& keep_indptr, const Tensor& keep_ends, const Tensor& keep_rows) {
  require(inputs.dimensions == 2 && inputs.dense_after(0), "inputs must be [num_tokens, channels], rows without gaps", inputs);
  const int64_t tokens = inputs.shape[0], channels = inputs.shape[1];
  for (const auto* factor : {&before, &after})
    if (*factor) require(is_rows(**factor, inputs), "before and after must be like inputs, rows without gaps", **factor);
  require(is_rows(outputs, inputs), "outputs must be like inputs, rows without gaps", outputs);
  require(weight.dimensions == 2 && weight.dtype == inputs.dtype && weight.shape[1] == channels && weight.dense() &&
              2 <= weight.shape[0] && weight.shape[0] <= kMaxTaps,
          "weight must be [2 to 4 taps, channels] of the dtype of inputs, without gaps", weight);
  if (bias) require(bias->dimensions == 1 && bias->dtype == inputs.dtype && bias->shape[0] == channels && bias->dense(), "bias must be [channels]", *bias);
  require(states.dimensions == 3 && states.dtype == inputs.dtype && states.shape[1] == weight.shape[0] - 1 &&
              states.shape[2] == channels && states.dense(),
          "states must be [rows, taps - 1, channels] of the dtype of inputs, without gaps", states);
  const Step step(indptr, rows, keep_indptr, keep_ends, keep_rows, tokens, states.shape[0]);
  const auto kernel = kernels_of(inputs.dtype).convolve;
  const int64_t tasks = (channels + kChannelsPerTask - 1) / kChannelsPerTask, size = size_of(inputs.dtype);
  nb::gil_scoped_release release;
  parallel_ranges(static_cast<int64_t>(step.order.size()) * tasks, tokens < 64 ? 8 : 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int32_t i = step.order[task % step.order.size()];
      const int64_t channel = task / step.order.size() * kChannelsPerTask;
      auto at = [&](const Tensor& t) { return t.as<char>() + channel * size; };
      auto maybe_at = [&](const std::optional<Tensor>& t) { return t ? at(*t) : nullptr; };
      kernel({at(inputs), maybe_at(before), maybe_at(after), at(outputs), inputs.strides[0], before ? before->strides[0] : 0,
              after ? after->strides[0] : 0, outputs.strides[0], at(weight), maybe_at(bias), at(states), channels, step.rows[i],
              std::min(kChannelsPerTask, channels - channel), step.indptr[i], step.indptr[i + 1], static_cast<int>(weight.shape[0]), silu,
              step.keeps(i)});
    }
  });
}

// The tensors of a scan; views of a projection may have gaps between tokens.
struct ScanTensors {
  const Tensor &query, &key, &value, &outputs, &states;
  int64_t tokens, key_heads, keys, heads, columns;

  ScanTensors(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& outputs, const Tensor& states)
      : query(query), key(key), value(value), outputs(outputs), states(states) {
    for (const Tensor* t : {&query, &key, &value, &outputs})
      require(t->dimensions == 3 && t->dtype == query.dtype && t->dense_after(1) && t->strides[1] == t->shape[2] && t->shape[0] == query.shape[0],
              "query, key, value and outputs must be [num_tokens, heads, size] of one dtype, heads without gaps", *t);
    tokens = query.shape[0], key_heads = query.shape[1], keys = query.shape[2];
    heads = value.shape[1], columns = value.shape[2];
    require(key.shape[1] == key_heads && key.shape[2] == keys, "key must be like query", key);
    require(0 < keys && keys <= kMaxKeys, "a key must have 1 to 256 features", key);
    require(key_heads > 0 && heads % key_heads == 0, "the heads of value must be a multiple of those of key", value);
    require(outputs.shape[1] == heads && outputs.shape[2] == columns, "outputs must be like value", outputs);
    require(states.dimensions == 4 && states.dtype == DType::float32 && states.shape[1] == heads && states.shape[2] == keys &&
                states.shape[3] == columns && states.dense(),
            "states must be [rows, heads, keys, columns] float32, without gaps", states);
  }

  // Computes all heads. decay and gain are [num_tokens, heads]; the scales are [num_tokens, key_heads] or null. `tiled`: head h has key
  // h % key_heads; else a key serves neighbouring heads.
  void run(const Step& step, const float* decay, const float* gain, const float* query_scale, const float* key_scale, const float* skip,
           bool corrects, bool tiled) const {
    const auto kernel = kernels_of(query.dtype).advance;
    const int64_t size = size_of(query.dtype), width = kernels<RecurrenceKernels>().columns, blocks = (columns + width - 1) / width;
    const int64_t sequences = static_cast<int64_t>(step.order.size());
    const int64_t together = sequences * heads >= 4 * num_threads() ? blocks : 1;  // blocks of a task
    const int64_t parts = (blocks + together - 1) / together;
    parallel_for(sequences * heads * parts, [&](int64_t task, int) {
      const int32_t i = step.order[task / parts / heads];
      const int64_t head = task / parts % heads, key_head = tiled ? head % key_heads : head / (heads / key_heads), first = task % parts * together;
      for (int64_t column = first * width; column < std::min((first + together) * width, columns); column += width) {
        auto of_head = [&](const Tensor& t, int64_t h, int64_t c) { return t.as<char>() + (h * t.strides[1] + c) * size; };
        kernel({of_head(query, key_head, 0), of_head(key, key_head, 0), of_head(value, head, column), of_head(outputs, head, column),
                query.strides[0], key.strides[0], value.strides[0], outputs.strides[0], decay + head, gain + head,
                query_scale ? query_scale + key_head : nullptr, key_scale ? key_scale + key_head : nullptr, heads, key_heads,
                skip ? skip[head] : 0.0f, states.as<float>() + head * keys * columns + column, heads * keys * columns, columns,
                step.rows[i], std::min(width, columns - column), keys, step.indptr[i], step.indptr[i + 1], corrects, step.keeps(i)});
      }
    });
  }
};

float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// GCC has no _Float16 in C++ for ARM64 before version 13.
float float_of_half(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | magnitude << 13);  // infinity, NaN
  const float x = float_of(magnitude << 13) * 0x1p112f;  // the exponent's bias is 127 and not 15
  return sign ? -x : x;
}

float number_at(const Tensor& t, int64_t token, int64_t column) {
  const int64_t at = token * t.strides[0] + column;
  if (t.dtype == DType::float32) return t.as<float>()[at];
  const uint16_t bits = t.as<uint16_t>()[at];
  return t.dtype == DType::bfloat16 ? float_of(static_cast<uint32_t>(bits) << 16) : float_of_half(bits);
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

void check_gate(const Tensor& gate, const Tensor& value, const char* what) {
  require(gate.dimensions == 2 && gate.dtype == value.dtype && gate.shape[0] == value.shape[0] && gate.shape[1] == value.shape[1] &&
              gate.dense_after(0),
          what, gate);
}

void check_heads(const Tensor& t, const Tensor& value, const char* what) {
  require(t.dimensions == 1 && t.dtype == DType::float32 && t.shape[0] == value.shape[1] && t.dense(), what, t);
}

void gated_delta_rule(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decay_gate, const Tensor& gain_gate,
                      const Tensor& rate, const Tensor& dt_bias, bool tiled, const Tensor& outputs, const Tensor& states, const Tensor& indptr,
                      const Tensor& rows, const Tensor& keep_indptr, const Tensor& keep_ends, const Tensor& keep_rows) {
  const ScanTensors scan(query, key, value, outputs, states);
  check_gate(decay_gate, value, "decay_gate must be [num_tokens, heads] of the dtype of value");
  check_gate(gain_gate, value, "gain_gate must be [num_tokens, heads] of the dtype of value");
  check_heads(rate, value, "rate must be [heads] float32");
  check_heads(dt_bias, value, "dt_bias must be [heads] float32");
  const Step step(indptr, rows, keep_indptr, keep_ends, keep_rows, scan.tokens, states.shape[0]);
  const int64_t heads = scan.heads, key_heads = scan.key_heads, all = scan.tokens * heads, all_keys = scan.tokens * key_heads;
  nb::gil_scoped_release release;
  float* decay = reinterpret_cast<float*>(scratch(2 * (all + all_keys) * sizeof(float)));
  float *gain = decay + all, *query_scale = gain + all, *key_scale = query_scale + all_keys;
  const auto inverse_norm = kernels_of(query.dtype).inverse_norm;
  const float scale = 1.0f / std::sqrt(static_cast<float>(scan.keys));
  parallel_ranges(scan.tokens, 16, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t head = 0; head < heads; ++head) {
        const float dt = softplus(number_at(decay_gate, token, head) + dt_bias.as<float>()[head]);
        decay[token * heads + head] = std::exp(rate.as<float>()[head] * dt);
        gain[token * heads + head] = 1.0f / (1.0f + std::exp(-number_at(gain_gate, token, head)));
      }
      for (int64_t head = 0; head < key_heads; ++head) {
        auto norm = [&](const Tensor& t) {
          return inverse_norm(t.as<char>() + (token * t.strides[0] + head * t.strides[1]) * size_of(t.dtype), scan.keys, 1e-6f);
        };
        query_scale[token * key_heads + head] = norm(query) * scale;
        key_scale[token * key_heads + head] = norm(key);
      }
    }
  });
  scan.run(step, decay, gain, query_scale, key_scale, nullptr, true, tiled);
}

void state_space_scan(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dt, const Tensor& rate,
                      const Tensor& dt_bias, const Tensor& skip, float least_dt, float most_dt, const Tensor& outputs,
                      const Tensor& states, const Tensor& indptr, const Tensor& rows, const Tensor& keep_indptr, const Tensor& keep_ends,
                      const Tensor& keep_rows) {
  const ScanTensors scan(query, key, value, outputs, states);
  check_gate(dt, value, "dt must be [num_tokens, heads] of the dtype of value");
  check_heads(rate, value, "rate must be [heads] float32");
  check_heads(dt_bias, value, "dt_bias must be [heads] float32");
  check_heads(skip, value, "skip must be [heads] float32");
  const Step step(indptr, rows, keep_indptr, keep_ends, keep_rows, scan.tokens, states.shape[0]);
  const int64_t heads = scan.heads, all = scan.tokens * heads;
  nb::gil_scoped_release release;
  float* decay = reinterpret_cast<float*>(scratch(2 * all * sizeof(float)));
  float* gain = decay + all;
  parallel_ranges(scan.tokens, 64, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token)
      for (int64_t head = 0; head < heads; ++head) {
        const float x = softplus(number_at(dt, token, head) + dt_bias.as<float>()[head]);
        gain[token * heads + head] = std::min(std::max(x, least_dt), most_dt);
        decay[token * heads + head] = std::exp(rate.as<float>()[head] * gain[token * heads + head]);
      }
  });
  scan.run(step, decay, gain, nullptr, nullptr, skip.as<float>(), false, false);
}

void gated_norm(const Tensor& rows, const Tensor& gate, const std::optional<Tensor>& weight, const Tensor& outputs, float eps,
                bool gate_first) {
  for (const Tensor* t : {&rows, &gate, &outputs})
    require(t->dimensions == 3 && t->dtype == rows.dtype && t->dense_after(1) && t->shape[0] == rows.shape[0] &&
                t->shape[1] == rows.shape[1] && t->shape[2] == rows.shape[2] && t->strides[1] == t->shape[2],
            "rows, gate and outputs must be [num_tokens, groups, size] of one dtype, groups without gaps", *t);
  const int64_t groups = rows.shape[1], size = rows.shape[2], bytes = size_of(rows.dtype);
  if (weight)
    require(weight->dimensions == 2 && weight->dtype == rows.dtype && (weight->shape[0] == 1 || weight->shape[0] == groups) &&
                weight->shape[1] == size && weight->dense(),
            "weight must be [1 or groups, size] of the dtype of rows, without gaps", *weight);
  const auto kernel = kernels_of(rows.dtype).gated_norm;
  nb::gil_scoped_release release;
  parallel_ranges(rows.shape[0] * groups, kElementsPerThread / (size + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t token = i / groups, group = i % groups;
      auto at = [&](const Tensor& t) { return t.as<char>() + (token * t.strides[0] + group * size) * bytes; };
      const char* factors = weight ? weight->as<char>() + (weight->shape[0] == 1 ? 0 : group * size) * bytes : nullptr;
      kernel(at(rows), at(gate), factors, at(outputs), size, eps, gate_first);
    }
  });
}

}  // namespace

void bind_recurrence(nb::module_& module) {
  module.def("short_convolution", short_convolution, nb::arg("inputs"), nb::arg("before").none(), nb::arg("after").none(),
             nb::arg("weight"), nb::arg("bias").none(), nb::arg("silu"), nb::arg("outputs"), nb::arg("states"), nb::arg("indptr"),
             nb::arg("rows"), nb::arg("keep_indptr"), nb::arg("keep_ends"), nb::arg("keep_rows"));
  module.def("gated_delta_rule", gated_delta_rule, nb::arg("query"), nb::arg("key"), nb::arg("value"), nb::arg("decay_gate"),
             nb::arg("gain_gate"), nb::arg("rate"), nb::arg("dt_bias"), nb::arg("tiled"), nb::arg("outputs"), nb::arg("states"), nb::arg("indptr"),
             nb::arg("rows"), nb::arg("keep_indptr"), nb::arg("keep_ends"), nb::arg("keep_rows"));
  module.def("state_space_scan", state_space_scan, nb::arg("query"), nb::arg("key"), nb::arg("value"), nb::arg("dt"), nb::arg("rate"),
             nb::arg("dt_bias"), nb::arg("skip"), nb::arg("least_dt"), nb::arg("most_dt"), nb::arg("outputs"), nb::arg("states"),
             nb::arg("indptr"), nb::arg("rows"), nb::arg("keep_indptr"), nb::arg("keep_ends"), nb::arg("keep_rows"));
  module.def("gated_norm", gated_norm, nb::arg("rows"), nb::arg("gate"), nb::arg("weight").none(), nb::arg("outputs"), nb::arg("eps"),
             nb::arg("gate_first"));
}

}  // namespace radixrt
