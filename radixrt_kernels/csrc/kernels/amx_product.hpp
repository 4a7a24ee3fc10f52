// Products of tokens and panels in AMX tiles, for linear layers of every packed form.
//
// A step of a panel is a line of 64 bytes: four bytes for each of 16 outputs, multiplied by four bytes of a token's inputs. Sixteen
// steps are a tile. The packed forms match the instructions, and tokens are read without a copy. Four of the eight registers hold the
// sums of 32 tokens and two panels, two hold tokens, two hold weights.
#pragma once

#include "amx.hpp"

#if defined(RADIXRT_HAS_AMX)

#include "kernels/linear.hpp"

namespace radixrt::RADIXRT_ISA {

inline constexpr int kAmxTokens = 2 * amx::kRows;
inline constexpr int kAmxSteps = amx::kRows;
inline constexpr int kStepLine = amx::kRowBytes;

struct PairsOfBFloat16 {
  template <int kSums, int kLeft, int kRight>
  static RADIXRT_INLINE void add_products() {
    amx::add_products_of_bfloat16<kSums, kLeft, kRight>();
  }
};

struct FoursOfBytes {  // inputs signed, weights unsigned
  template <int kSums, int kLeft, int kRight>
  static RADIXRT_INLINE void add_products() {
    amx::add_products_of_bytes<kSums, kLeft, kRight>();
  }
};

// Lines prefetched into the second-level cache, one per step and panel.
struct Ahead {
  const char* lines = nullptr;
  int panels = 0;
};

// Owns the thread's tile registers for products of at most kAmxTokens tokens.
template <class Operands>
class AmxProduct {
 public:
  explicit AmxProduct(int tokens) : upper_(tokens < amx::kRows ? tokens : amx::kRows), lower_(tokens - upper_) {}
  ~AmxProduct() { amx::release(); }
  AmxProduct(const AmxProduct&) = delete;

  // sums[token][panel][16], of 32 bits each and `panels` wide, are set to the products of `steps` steps, or the products are added.
  RADIXRT_INLINE void multiply(
      bool add, const void* weights, int64_t panel_bytes, int panels, const void* inputs, int64_t input_bytes, int64_t steps, Ahead ahead,
      void* sums) {
    auto w = static_cast<const char*>(weights);
    auto x = static_cast<const char*>(inputs);
    auto to = static_cast<char*>(sums);
    int64_t tiles = steps / kAmxSteps, rest = steps % kAmxSteps;
    for (int panel = 0; panel < panels; panel += 2) {
      Part part{w, panel_bytes, panels - panel < 2 ? 1 : 2, x, input_bytes, to, panels * int64_t{kStepLine}, ahead};
      if (tiles) run_shaped(kAmxSteps, part, tiles, add);
      if (rest) {
        int64_t done = tiles * kAmxSteps;
        part.weights += done * kStepLine;
        part.inputs += 4 * done;
        part.ahead.lines += done * kStepLine;
        run_shaped(static_cast<int>(rest), part, 1, add || tiles);
      }
      w += 2 * panel_bytes;
      to += 2 * kStepLine;
      ahead.panels = 0;  // already prefetched with the first two panels
    }
  }

 private:
  struct Part {
    const char* weights;
    int64_t panel_bytes;
    int panels;
    const char* inputs;
    int64_t input_bytes;
    char* sums;
    int64_t sum_bytes;
    Ahead ahead;
  };

  RADIXRT_INLINE void run_shaped(int steps, const Part& part, int64_t tiles, bool add) {
    shape(steps);
    if (part.panels == 2) lower_ ? run<2, 2>(part, tiles, add) : run<1, 2>(part, tiles, add);
    else lower_ ? run<2, 1>(part, tiles, add) : run<1, 1>(part, tiles, add);
  }

  // Tiles 0 to 3 hold sums: two panels of upper rows, two of lower rows. 4 and 5 hold tokens, 6 and 7 weights.
  void shape(int steps) {
    if (steps == steps_) return;
    amx::Shapes shapes;
    for (int panel = 0; panel < 2; ++panel) {
      shapes.set(panel, upper_, kStepLine);
      if (lower_) shapes.set(2 + panel, lower_, kStepLine);
      shapes.set(6 + panel, steps, kStepLine);
    }
    shapes.set(4, upper_, 4 * steps);
    if (lower_) shapes.set(5, lower_, 4 * steps);
    amx::configure(shapes);
    steps_ = steps;
  }

  template <int kTile>
  static RADIXRT_INLINE void begin(bool add, const char* sums, int64_t sum_bytes) {
    if (add) amx::load<kTile>(sums, sum_bytes);
    else amx::zero<kTile>();
  }

  template <int kHalves, int kPanels>
  static RADIXRT_INLINE void run(const Part& part, int64_t tiles, bool add) {
    int64_t stride = part.sum_bytes;
    char* lower_sums = part.sums + amx::kRows * stride;
    begin<0>(add, part.sums, stride);
    if constexpr (kPanels == 2) begin<1>(add, part.sums + kStepLine, stride);
    if constexpr (kHalves == 2) begin<2>(add, lower_sums, stride);
    if constexpr (kHalves == 2 && kPanels == 2) begin<3>(add, lower_sums + kStepLine, stride);
    const char *weights = part.weights, *inputs = part.inputs, *ahead = part.ahead.lines;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      amx::load<4>(inputs, part.input_bytes);
      amx::load<6>(weights, kStepLine);
      Operands::template add_products<0, 4, 6>();
      if constexpr (kPanels == 2) {
        amx::load<7>(weights + part.panel_bytes, kStepLine);
        Operands::template add_products<1, 4, 7>();
      }
      if constexpr (kHalves == 2) {
        amx::load<5>(inputs + amx::kRows * part.input_bytes, part.input_bytes);
        Operands::template add_products<2, 5, 6>();
        if constexpr (kPanels == 2) Operands::template add_products<3, 5, 7>();
      }
      for (int panel = 0; panel < part.ahead.panels; ++panel)
        for (int step = 0; step < kAmxSteps; ++step) __builtin_prefetch(ahead + panel * part.panel_bytes + step * kStepLine, 0, 2);
      weights += kAmxSteps * kStepLine;
      inputs += kAmxSteps * 4;
      ahead += kAmxSteps * kStepLine;
    }
    amx::store<0>(part.sums, stride);
    if constexpr (kPanels == 2) amx::store<1>(part.sums + kStepLine, stride);
    if constexpr (kHalves == 2) amx::store<2>(lower_sums, stride);
    if constexpr (kHalves == 2 && kPanels == 2) amx::store<3>(lower_sums + kStepLine, stride);
  }

  int upper_, lower_;  // tokens in the first and second half
  int steps_ = 0;      // configured steps
};

}  // namespace radixrt::RADIXRT_ISA

#endif
