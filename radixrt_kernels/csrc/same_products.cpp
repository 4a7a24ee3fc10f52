// Computes one small product of each packed form with two instruction sets.
#include "same_products.hpp"

#include <cstring>
#include <vector>

#include "kernels/groupwise.hpp"
#include "kernels/linear.hpp"

namespace radixrt {

namespace {

// Groups of four panels and single panels, a partial last panel; whole and partial tiles of tokens and of columns.
constexpr int64_t kRows = 90, kColumns = 216, kGroup = 128;
constexpr int kPanels = 6, kTokens = 37;

// The same numbers at each call, from 0 to `count` - 1.
struct Numbers {
  uint32_t state = 1;
  int below(int count) {
    state = state * 1664525 + 1013904223;
    return static_cast<int>(state >> 16) % count;
  }
};

uint16_t bfloat16_of(int x) {  // x has at most 8 significant bits
  auto wide = static_cast<float>(x);
  uint32_t bits;
  memcpy(&bits, &wide, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}

std::vector<char> bfloat16_products(const LinearKernels::Of& kernel) {
  Numbers numbers;
  std::vector<uint16_t> weights(kPanels * 16 * kColumns), hidden(kTokens * kColumns);
  for (auto& weight : weights) weight = bfloat16_of(numbers.below(15) - 7);
  for (auto& x : hidden) x = bfloat16_of(numbers.below(15) - 7);
  auto prepared_bytes = kernel.prepared_bytes(kColumns);
  std::vector<char> prepared(kTokens * prepared_bytes), output(kTokens * kRows * 2);
  Linear linear{reinterpret_cast<char*>(weights.data()), kRows, kColumns, nullptr,
                reinterpret_cast<char*>(hidden.data()), kColumns * 2, output.data(), kRows * 2};
  if (prepared_bytes) {
    for (int token = 0; token < kTokens; ++token)
      kernel.prepare(linear.hidden + token * linear.hidden_bytes, kColumns, prepared.data() + token * prepared_bytes);
    linear.hidden = prepared.data();
    linear.hidden_bytes = prepared_bytes;
  }
  kernel.multiply(linear, 0, kPanels, 0, kTokens);
  return output;
}

std::vector<char> groupwise_products(const GroupwiseKernels& kernels, int bits) {
  Numbers numbers;
  constexpr int64_t kGroups = (kColumns + kGroup - 1) / kGroup;
  std::vector<uint8_t> codes(kPanels * 16 * kColumns * bits / 8), zeros(kPanels * 16 * kGroups);
  std::vector<uint16_t> scales(zeros.size(), 0x3800);  // 0.5
  std::vector<float> hidden(kTokens * kColumns);
  for (auto& code : codes) code = static_cast<uint8_t>(numbers.below(256));
  for (auto& zero : zeros) zero = static_cast<uint8_t>(numbers.below(1 << bits));
  for (size_t i = 0; i < hidden.size(); ++i)  // the largest value of each chunk is 127, so its scale is 1
    hidden[i] = static_cast<float>(i % kColumns % kGroup ? numbers.below(255) - 127 : 127);
  int64_t prepared_bytes = kernels.prepared_bytes(kColumns, kGroup);
  std::vector<char> prepared(kTokens * prepared_bytes), output(kTokens * kRows * sizeof(float));
  for (int token = 0; token < kTokens; ++token)
    kernels.float32.prepare(hidden.data() + token * kColumns, kColumns, kGroup, prepared.data() + token * prepared_bytes);
  Groupwise matrix{codes.data(), reinterpret_cast<char*>(scales.data()), zeros.data(), kRows, kColumns, kGroup, kGroup, nullptr,
                   prepared.data(), prepared_bytes, output.data(), kRows * static_cast<int64_t>(sizeof(float))};
  (bits == 8 ? kernels.float32.multiply_8 : kernels.float32.multiply_4)(matrix, 0, kPanels, 0, kTokens);
  return output;
}

}  // namespace

bool same_products(Isa one, Isa other) {
  const auto &a = kernels<LinearKernels>(one), &b = kernels<LinearKernels>(other);
  const auto &c = kernels<GroupwiseKernels>(one), &d = kernels<GroupwiseKernels>(other);
  return bfloat16_products(a.bfloat16) == bfloat16_products(b.bfloat16) &&
         groupwise_products(c, 8) == groupwise_products(d, 8) && groupwise_products(c, 4) == groupwise_products(d, 4);
}

}  // namespace radixrt
