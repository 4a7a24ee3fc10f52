// Gated activations and the soft cap of logits: interface of every instruction set.
#pragma once

#include <cstdint>

namespace radixrt {

enum class Activation { silu, gelu_tanh, gelu, clamped_swiglu };

struct ActivationKernels {
  // output[i] = activation(gate_up[i]) * gate_up[size + i] for i < size, in float32, rounded once. clamped_swiglu also bounds both, and adds
  // one to the second (gpt-oss).
  using Row = void (*)(Activation activation, const void* gate_up, void* output, int64_t size);
  Row float32, bfloat16, float16;
  // output = values * sigmoid(gate), the sigmoid rounded first; without values the sigmoid. `one_gate`: it is the same for all values.
  using SigmoidGate = void (*)(const void* values, const void* gate, void* output, int64_t size, bool one_gate);
  SigmoidGate sigmoid_float32, sigmoid_bfloat16, sigmoid_float16;
  // logits[i] = cap * tanh(logits[i] / cap)
  void (*soft_cap)(float* logits, int64_t count, float cap);
};

}  // namespace radixrt
