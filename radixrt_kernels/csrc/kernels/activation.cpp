// Gated activations of one row, and the soft cap of logits; compiled once for each instruction set.
#include "kernels/activation.hpp"

#include "isa.hpp"
#include "simd.hpp"

namespace radixrt {
namespace RADIXRT_ISA {
namespace {

constexpr float kSwigluAlpha = 1.702f, kSwigluLimit = 7.0f;  // gpt-oss

RADIXRT_INLINE Floats silu(Floats x) { return x / (1.0f + exp(-x)); }

RADIXRT_INLINE Floats gelu_tanh(Floats x) {
  // (1 + tanh(u)) / 2 is the logistic function of 2u
  Floats u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return x / (1.0f + exp(-2.0f * u));
}

// erf with an error up to 2e-7: Abramowitz and Stegun 7.1.26 (1.5e-7) plus the rounding of float32.
RADIXRT_INLINE Floats erf(Floats x) {
  Floats magnitude = x < 0.0f ? -x : x;
  Floats t = 1.0f / (1.0f + 0.3275911f * magnitude);
  Floats p = splat(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  Floats y = 1.0f - p * t * exp(-magnitude * magnitude);
  return x < 0.0f ? -y : y;
}

RADIXRT_INLINE Floats gelu(Floats x) { return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f)); }

RADIXRT_INLINE Floats clamped_swiglu(Floats gate, Floats up) {
  gate = gate > kSwigluLimit ? splat(kSwigluLimit) : gate;
  up = up > kSwigluLimit ? splat(kSwigluLimit) : up < -kSwigluLimit ? splat(-kSwigluLimit) : up;
  return gate / (1.0f + exp(-kSwigluAlpha * gate)) * (up + 1.0f);
}

// `function` of (gate, up).
template <class T, class Function>
RADIXRT_INLINE void gated(const T* gate_up, T* output, int64_t size, Function function) {
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) store(output + i, function(load(gate_up + i), load(gate_up + size + i)));
  if (int rest = static_cast<int>(size - i))
    store_first(output + i, function(load_first(gate_up + i, rest), load_first(gate_up + size + i, rest)), rest);
}

template <class T>
void row(Activation activation, const void* from, void* to, int64_t size) {
  auto gate_up = static_cast<const T*>(from);
  auto output = static_cast<T*>(to);
  switch (activation) {
    case Activation::silu: return gated(gate_up, output, size, [](Floats gate, Floats up) { return silu(gate) * up; });
    case Activation::gelu_tanh: return gated(gate_up, output, size, [](Floats gate, Floats up) { return gelu_tanh(gate) * up; });
    case Activation::gelu: return gated(gate_up, output, size, [](Floats gate, Floats up) { return gelu(gate) * up; });
    case Activation::clamped_swiglu: return gated(gate_up, output, size, [](Floats gate, Floats up) { return clamped_swiglu(gate, up); });
  }
}

RADIXRT_INLINE Floats rounded(Floats x, const float*) { return x; }
RADIXRT_INLINE Floats rounded(Floats x, const BFloat16*) { return (Floats)(__builtin_convertvector(to_bfloat16(x), UInts) << 16); }
RADIXRT_INLINE Floats rounded(Floats x, const Float16*) { return from_float16(to_float16(x)); }

template <class T>
void sigmoid_gate(const void* value_row, const void* gate_row, void* output_row, int64_t size, bool one_gate) {
  auto values = static_cast<const T*>(value_row), gate = static_cast<const T*>(gate_row);
  auto output = static_cast<T*>(output_row);
  auto gated = [&](Floats x, Floats value) {
    Floats sigmoid = 1.0f / (1.0f + exp(-x));
    return values ? rounded(sigmoid, gate) * value : sigmoid;
  };
  const Floats same = splat(load_first(gate, 1)[0]);
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth)
    store(output + i, gated(one_gate ? same : load(gate + i), values ? load(values + i) : same));
  if (int rest = static_cast<int>(size - i))
    store_first(output + i, gated(one_gate ? same : load_first(gate + i, rest), values ? load_first(values + i, rest) : same), rest);
}

void soft_cap(float* logits, int64_t count, float cap) {
  auto capped = [=](Floats x) { return cap * (1.0f - 2.0f / (1.0f + exp(2.0f * (x / cap)))); };
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(logits + i, capped(load(logits + i)));
  if (int rest = static_cast<int>(count - i)) store_first(logits + i, capped(load_first(logits + i, rest)), rest);
}

}  // namespace
}  // namespace RADIXRT_ISA

template <>
const ActivationKernels& table_of<ActivationKernels, Isa::RADIXRT_ISA>() {
  using namespace RADIXRT_ISA;
  static constexpr ActivationKernels table{row<float>, row<BFloat16>, row<Float16>, sigmoid_gate<float>, sigmoid_gate<BFloat16>,
                                           sigmoid_gate<Float16>, soft_cap};
  return table;
}

}  // namespace radixrt
