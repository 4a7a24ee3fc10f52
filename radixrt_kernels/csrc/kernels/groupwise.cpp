// Products of activations and a packed matrix with 4- or 8-bit codes; compiled once for each instruction set.
#include "kernels/groupwise.hpp"

#include "isa.hpp"
#include "kernels/amx_product.hpp"
#include "kernels/byte_products.hpp"

namespace radixrt {
namespace RADIXRT_ISA {
namespace {

// ------------------------------------------------------------ activations
//
// The prepared form of a token: one scale per chunk, the sum of each chunk's rounded activations, and the activations in fours.

struct Prepared {
  float *scales, *totals;
  Activations activations;
};

RADIXRT_INLINE int64_t header_bytes(int64_t chunks) { return (2 * chunks * 4 + 63) / 64 * 64; }

RADIXRT_INLINE int64_t padded(int64_t columns) { return (columns + 7) / 8 * 8; }

RADIXRT_INLINE Prepared prepared_at(const void* prepared, int64_t columns, int64_t chunks) {
  auto at = static_cast<char*>(const_cast<void*>(prepared));
  auto scales = reinterpret_cast<float*>(at);
  return {scales, scales + chunks, {at + header_bytes(chunks), padded(columns)}};
}

int64_t prepared_bytes(int64_t columns, int64_t chunk) {
  return header_bytes((columns + chunk - 1) / chunk) + Activations::bytes(padded(columns));
}

template <class T>
void prepare(const void* hidden, int64_t columns, int64_t chunk, void* prepared) {
  int64_t chunks = (columns + chunk - 1) / chunk;
  Prepared to = prepared_at(prepared, columns, chunks);
  for (int64_t c = 0; c < chunks; ++c) {
    auto from = static_cast<const T*>(hidden) + c * chunk;
    int count = static_cast<int>(columns - c * chunk < chunk ? columns - c * chunk : chunk);
    ActivationScale scale = scale_of(from, count);
    to.scales[c] = scale.scale;
    to.totals[c] = sum(round_to_bytes(from, count, scale.inverse, to.activations, c * chunk));
  }
}

// ------------------------------------------------------------ tiles

// Adds the scaled products of one chunk to the sums of `tokens` tokens.
template <int kPanels>
RADIXRT_INLINE void add_scaled(
    const Groupwise& matrix, int64_t panel, int64_t group, int64_t chunk, const char* inputs, int tokens,
    const Ints (*products)[kPanels][kVectors], TokenSums<kPanels>* sums) {
  int64_t groups = matrix.groups(), chunks = matrix.chunks();
  for (int p = 0; p < kPanels; ++p) {
    for (int v = 0; v < kVectors; ++v) {
      int64_t at = ((panel + p) * groups + group) * kPanel + v * kWidth;
      Floats scale = load(reinterpret_cast<const Float16*>(matrix.scales) + at);
      Floats zero = bytes_at(matrix.zeros + at);
      for (int t = 0; t < tokens; ++t) {
        Prepared token = prepared_at(inputs + t * matrix.input_bytes, matrix.columns, chunks);
        Floats dot = __builtin_convertvector(products[t][p][v], Floats) - zero * token.totals[chunk];
        sums[t].of[p][v] += dot * (scale * token.scales[chunk]);
      }
    }
  }
}

// Adds the products of `kSteps` steps of 8 columns.
template <int kBits, int kSteps, int kTokens, int kPanels, class Four, class Sums>
RADIXRT_INLINE void add_steps(
    const uint8_t* codes, int64_t panel_bytes, bool prefetch, const Four* const* x, int64_t first_step, Sums (*products)[kPanels][kVectors]) {
  using Multiplied = OperandsOf<(1 << kBits) - 1>;
#pragma GCC unroll 4
  for (int step = 0; step < kSteps; ++step, codes += 8 * kPanel * kBits / 8) {
    if (prefetch) {
      for (int p = 0; p < kPanels; ++p) {
        __builtin_prefetch(codes + (kPanels + p) * panel_bytes, 0, 2);
        if constexpr (kBits == 8) __builtin_prefetch(codes + (kPanels + p) * panel_bytes + kStepBytes, 0, 2);
      }
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      typename Multiplied::Codes w[kPanels][kVectors];
      for (int p = 0; p < kPanels; ++p) {
        for (int v = 0; v < kVectors; ++v) {
          const uint8_t* at = codes + p * panel_bytes + v * sizeof(UInts);
          if constexpr (kBits == 8) w[p][v] = Multiplied::codes(codes_at(at + half * kStepBytes));
          else w[p][v] = Multiplied::codes((half ? codes_at(at) >> 4 : codes_at(at)) & 0x0f0f0f0fu);
        }
      }
      for (int t = 0; t < kTokens; ++t)
        for (int p = 0; p < kPanels; ++p)
          for (int v = 0; v < kVectors; ++v)
            products[t][p][v].add(2 * step + half, 2 * kSteps, w[p][v], x[t][2 * (first_step + step) + half]);
    }
  }
}

// Adds the products of one chunk to the sums of `kTokens` tokens.
template <int kBits, int kTokens, int kPanels>
RADIXRT_INLINE void add_chunk(
    const Groupwise& matrix, int64_t panel, int64_t group, int64_t first_step, int64_t steps, int64_t chunk, const char* inputs,
    bool prefetch, TokenSums<kPanels>* sums) {
  constexpr int kLargest = (1 << kBits) - 1, kStep8Bytes = 8 * kPanel * kBits / 8;  // bytes of 8 columns
  using Sums = Products<kLargest>;
  constexpr int kRunSteps = Sums::kRun < 2 ? 1 : Sums::kRun / 2;
  int64_t panel_bytes = matrix.steps() * kStep8Bytes, chunks = matrix.chunks();
  const uint8_t* codes = matrix.codes + panel * panel_bytes + first_step * kStep8Bytes;
  Sums products[kTokens][kPanels][kVectors] = {};
  const typename OperandsOf<kLargest>::Four* x[kTokens];
  for (int t = 0; t < kTokens; ++t)
    x[t] = prepared_at(inputs + t * matrix.input_bytes, matrix.columns, chunks).activations.template fours<kInBytes<kLargest>>() + 2 * first_step;
  int64_t step = 0;
  for (; step + kRunSteps <= steps; step += kRunSteps, codes += kRunSteps * kStep8Bytes)
    add_steps<kBits, kRunSteps, kTokens, kPanels>(codes, panel_bytes, prefetch, x, step, products);
  if constexpr (kRunSteps > 1)
    for (; step < steps; ++step, codes += kStep8Bytes)
      add_steps<kBits, 1, kTokens, kPanels>(codes, panel_bytes, prefetch, x, step, products);
  Ints complete[kTokens][kPanels][kVectors];
  for (int t = 0; t < kTokens; ++t)
    for (int p = 0; p < kPanels; ++p)
      for (int v = 0; v < kVectors; ++v) complete[t][p][v] = products[t][p][v].sums;
  add_scaled<kPanels>(matrix, panel, group, chunk, inputs, kTokens, complete, sums);
}

template <int kBits, int kPanels, int kTokens = kTileTokens>
RADIXRT_INLINE void add_tokens(
    const Groupwise& matrix, int64_t panel, int tokens, const char* inputs, bool prefetch, TokenSums<kPanels>* sums) {
  if constexpr (kTokens > 1) {
    if (tokens < kTokens) return add_tokens<kBits, kPanels, kTokens - 1>(matrix, panel, tokens, inputs, prefetch, sums);
  }
  int64_t steps = matrix.steps(), chunk_steps = matrix.chunk / 8, chunk = 0;
  for (int64_t step = 0; step < steps; step += chunk_steps, ++chunk) {
    int64_t count = steps - step < chunk_steps ? steps - step : chunk_steps;
    add_chunk<kBits, kTokens, kPanels>(matrix, panel, 8 * step / matrix.group_size, step, count, chunk, inputs, prefetch, sums);
  }
}

#if defined(RADIXRT_HAS_AMX)

// Two lines of 8-bit codes for each line of 4-bit ones.
RADIXRT_INLINE void unpack(const uint8_t* codes, int64_t lines, uint8_t* to) {
  for (int64_t line = 0; line < lines; ++line) {
    UInts both = codes_at(codes + line * kStepBytes), low = both & 0x0f0f0f0fu, high = both >> 4 & 0x0f0f0f0fu;
    memcpy(to + 2 * line * kStepBytes, &low, sizeof low);
    memcpy(to + (2 * line + 1) * kStepBytes, &high, sizeof high);
  }
}

// Same as `add_tokens` for more tokens. Integer sums do not depend on their order.
template <int kBits, int kPanels>
void add_tokens_by_amx(
    const Groupwise& matrix, int64_t panel, int tokens, const char* inputs, bool prefetch, TokenSums<kPanels>* sums) {
  constexpr int kStep8Bytes = 8 * kPanel * kBits / 8;  // bytes of 8 columns
  int64_t steps = matrix.steps(), panel_bytes = steps * kStep8Bytes, chunk_steps = matrix.chunk / 8, chunks = matrix.chunks();
  AmxProduct<FoursOfBytes> product(tokens);
  Ints products[kAmxTokens][kPanels][kVectors];
  int64_t chunk = 0;
  for (int64_t step = 0; step < steps; step += chunk_steps, ++chunk) {
    int64_t count = steps - step < chunk_steps ? steps - step : chunk_steps;
    const uint8_t* codes = matrix.codes + panel * panel_bytes + step * kStep8Bytes;
    if (prefetch)
      for (int p = 0; p < kPanels; ++p)
        for (int64_t byte = 0; byte < count * kStep8Bytes; byte += 64) __builtin_prefetch(codes + (kPanels + p) * panel_bytes + byte, 0, 2);
    int64_t codes_bytes = panel_bytes;  // from one panel to the next
    alignas(64) uint8_t unpacked[kBits == 4 ? kPanels : 1][kLongestChunk / 4 * kStepBytes];
    if constexpr (kBits == 4) {
      for (int p = 0; p < kPanels; ++p) unpack(codes + p * panel_bytes, count, unpacked[p]);
      codes = unpacked[0];
      codes_bytes = sizeof unpacked[0];
    }
    auto fours = prepared_at(inputs, matrix.columns, chunks).activations.fours<true>() + 2 * step;
    product.multiply(false, codes, codes_bytes, kPanels, fours, matrix.input_bytes, 2 * count, {}, products);
    add_scaled<kPanels>(matrix, panel, 8 * step / matrix.group_size, chunk, inputs, tokens, products, sums);
  }
}

constexpr int kMostTokens = kAmxTokens;
#else
constexpr int kMostTokens = kTileTokens;
#endif

// One tile: at most `at_once` tokens, which is kTileTokens or kMostTokens.
template <int kBits, int kPanels>
void add_tile(
    [[maybe_unused]] int at_once, const Groupwise& matrix, int64_t panel, int tokens, const char* inputs, bool prefetch,
    TokenSums<kPanels>* __restrict sums) {
#if defined(RADIXRT_HAS_AMX)
  if (at_once == kMostTokens) return add_tokens_by_amx<kBits, kPanels>(matrix, panel, tokens, inputs, prefetch, sums);
#endif
  add_tokens<kBits, kPanels>(matrix, panel, tokens, inputs, prefetch, sums);
}

template <class T, int kBits, int kPanels>
void multiply_panels(const Groupwise& matrix, int64_t panel, int64_t first_token, int tokens) {
  int at_once = tokens > kFewTokens ? kMostTokens : kTileTokens;
  int tiles = (tokens + at_once - 1) / at_once;
  for (int i = 0; i < tiles; ++i) {
    int begin = tokens * i / tiles, end = tokens * (i + 1) / tiles;
    TokenSums<kPanels> sums[kMostTokens];
    memset(sums, 0, sizeof sums);
    const char* inputs = matrix.inputs + (first_token + begin) * matrix.input_bytes;
    add_tile<kBits, kPanels>(at_once, matrix, panel, end - begin, inputs, i == 0, sums);
    for (int t = begin; t < end; ++t) finish<T, kPanels>(matrix, panel, first_token + t, sums[t - begin]);
  }
}

template <class T, int kBits>
void multiply(const Groupwise& matrix, int64_t first_panel, int panels, int64_t first_token, int tokens) {
  while (panels >= kTilePanels) {
    multiply_panels<T, kBits, kTilePanels>(matrix, first_panel, first_token, tokens);
    first_panel += kTilePanels;
    panels -= kTilePanels;
  }
  if constexpr (kTilePanels > 1) {
    for (; panels > 0; --panels) multiply_panels<T, kBits, 1>(matrix, first_panel++, first_token, tokens);
  }
}

// ------------------------------------------------------------ rows of an embedding

template <class T, int kBits>
void look_up(const Groupwise& matrix, int64_t row, void* output) {
  int64_t panel = row / kPanel, lane = row % kPanel;
  const uint8_t* codes = matrix.codes + panel * matrix.steps() * (8 * kPanel * kBits / 8) + 4 * lane;
  auto to = static_cast<T*>(output);
  for (int64_t i = 0; i < matrix.columns; i += kWidth) {
    float weights[kWidth] = {};
    int count = static_cast<int>(matrix.columns - i < kWidth ? matrix.columns - i : kWidth);
    for (int lane_out = 0; lane_out < count; ++lane_out) {
      int64_t column = i + lane_out, at = (panel * matrix.groups() + column / matrix.group_size) * kPanel + lane;
      int code;
      if constexpr (kBits == 8) code = codes[column / 4 * kStepBytes + column % 4];
      else code = codes[column / 8 * kStepBytes + column % 4] >> (column % 8 / 4 * 4) & 15;
      Float16 scale[kWidth] = {};
      memcpy(scale, matrix.scales + 2 * at, 2);
      weights[lane_out] = static_cast<float>(code - matrix.zeros[at]) * load(scale)[0];
    }
    store_first(to + i, load(weights), count);
  }
}

template <class T>
constexpr GroupwiseKernels::Of kernels_of() {
  return {prepare<T>, multiply<T, 8>, multiply<T, 4>, look_up<T, 8>, look_up<T, 4>};
}

}  // namespace
}  // namespace RADIXRT_ISA

template <>
const GroupwiseKernels& table_of<GroupwiseKernels, Isa::RADIXRT_ISA>() {
  using namespace RADIXRT_ISA;
  static constexpr GroupwiseKernels table{prepared_bytes, kernels_of<float>(), kernels_of<BFloat16>(), kernels_of<Float16>()};
  return table;
}

}  // namespace radixrt
