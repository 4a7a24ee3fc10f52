// Products of activations and a packed weight matrix; compiled once for each instruction set.
//
// A tile is some tokens times some panels. Its sums stay in registers during the loop over the inputs. Few tokens: reading the
// weights from memory is the limit. Many tokens: a unit's weights stay in the second-level cache during the loop over the tiles, and
// the next unit's weights are prefetched.
//
// AMX has a different order of summation. If it is used, it is also used for a single token, because the sums of a token must not
// depend on the number of tokens.
#include "kernels/linear.hpp"

#include "isa.hpp"
#include "kernels/amx_product.hpp"
#include "simd.hpp"

namespace radixrt {
namespace RADIXRT_ISA {
namespace {

constexpr int kVectors = kPanel / kWidth;  // vectors that hold one panel's sums

// The sums of a tile use half to three quarters of the registers.
#if defined(__AVX512F__)
constexpr int kTileTokens = 6, kTilePanels = 4;
#else
constexpr int kTileTokens = kWidth == 8 ? 4 : 2, kTilePanels = 1;
#endif

// Bytes of a panel that are multiplied before the next tokens; those of a unit fit into the second-level cache.
constexpr int64_t kBlockBytes = 128 << 10;

// ------------------------------------------------------------ packed forms
//
// A form defines the columns per step, the tokens per tile, the input type of a step, and the multiplication.

struct Sums {
  Floats of[kVectors];
};

template <class T>
struct OneByOne {  // float32 and float16: one column per step, in float32
  using Weight = T;
  using Input = float;
  static constexpr int kColumns = 1;
  static constexpr int kStepBytes = kPanel * sizeof(T);
  static constexpr int kTokens = kTileTokens;

  static RADIXRT_INLINE bool used_as_is(int64_t) { return sizeof(T) == sizeof(Input); }
  static RADIXRT_INLINE void prepare(const T* hidden, int64_t columns, Input* to) {
    int64_t i = 0;
    for (; i + kWidth <= columns; i += kWidth) store(to + i, load(hidden + i));
    if (int rest = static_cast<int>(columns - i)) store(to + i, load_first(hidden + i, rest));
  }

  static RADIXRT_INLINE void look_up(const T* panel, int64_t columns, int lane, T* output) {
    for (int64_t i = 0; i < columns; ++i) output[i] = panel[kPanel * i + lane];
  }

  struct Weights {
    Floats of[kVectors];
  };
  static RADIXRT_INLINE Weights weights(const char* from) {
    Weights w;
    for (int v = 0; v < kVectors; ++v) w.of[v] = load(reinterpret_cast<const T*>(from) + v * kWidth);
    return w;
  }
  static RADIXRT_INLINE void add(Sums& sums, const Weights& w, const Input* x) {
    for (int v = 0; v < kVectors; ++v) sums.of[v] += w.of[v] * *x;
  }
};

struct Pairs {  // bfloat16: two columns per step
  using Weight = BFloat16;
  static constexpr int kColumns = 2;
  static constexpr int kStepBytes = 2 * kPanel * sizeof(BFloat16);
#if defined(RADIXRT_HAS_AMX)
  static constexpr int kTokens = kAmxTokens;
#else
  static constexpr int kTokens = kTileTokens;
#endif

  static RADIXRT_INLINE void look_up(const BFloat16* panel, int64_t columns, int lane, BFloat16* output) {
    for (int64_t i = 0; i < columns; ++i) output[i] = panel[2 * kPanel * (i / 2) + 2 * lane + i % 2];
  }

#if defined(__AVX512BF16__)
  using Input = uint32_t;  // a pair of bfloat16

  static RADIXRT_INLINE bool used_as_is(int64_t columns) { return columns % 2 == 0; }
  static RADIXRT_INLINE void prepare(const BFloat16* hidden, int64_t columns, Input* to) {
    to[(columns + 1) / 2 - 1] = 0;
    memcpy(to, hidden, columns * sizeof *hidden);
  }

  struct Weights {
    __m512bh of;
  };
  static RADIXRT_INLINE Weights weights(const char* from) { return {(__m512bh)_mm512_loadu_si512(from)}; }
  static RADIXRT_INLINE void add(Sums& sums, const Weights& w, const Input* x) {
    sums.of[0] = (Floats)_mm512_dpbf16_ps((__m512)sums.of[0], w.of, (__m512bh)_mm512_set1_epi32(static_cast<int>(*x)));
  }
#else
  using Input = float[2];

  static RADIXRT_INLINE bool used_as_is(int64_t) { return false; }
  static RADIXRT_INLINE void prepare(const BFloat16* hidden, int64_t columns, Input* to) {
    to[(columns + 1) / 2 - 1][1] = 0;
    OneByOne<BFloat16>::prepare(hidden, columns, to[0]);
  }

  struct Weights {
    Floats even[kVectors], odd[kVectors];
  };
  static RADIXRT_INLINE Weights weights(const char* from) {
    Weights w;
    for (int v = 0; v < kVectors; ++v) {
      UInts pair;
      memcpy(&pair, from + v * sizeof pair, sizeof pair);
      w.even[v] = (Floats)(pair << 16);
      w.odd[v] = (Floats)(pair & 0xffff0000u);
    }
    return w;
  }
  static RADIXRT_INLINE void add(Sums& sums, const Weights& w, const Input* x) {
    for (int v = 0; v < kVectors; ++v) sums.of[v] = sums.of[v] + w.even[v] * (*x)[0] + w.odd[v] * (*x)[1];
  }
#endif
};

// ------------------------------------------------------------ tiles

template <int kPanels>
struct TokenSums {
  Sums of[kPanels];
};

// Adds `steps` steps of `kPanels` panels, `panel_bytes` apart, to the sums of `kTokens` tokens.
template <class Form, int kTokens, int kPanels>
RADIXRT_INLINE void add_steps(
    const char* weights, int64_t panel_bytes, const char* inputs, int64_t input_bytes, int64_t steps, const char* ahead,
    int panels_ahead, TokenSums<kPanels>* sums) {
  using Input = typename Form::Input;
  Sums local[kTokens][kPanels];
  for (int t = 0; t < kTokens; ++t)
    for (int p = 0; p < kPanels; ++p) local[t][p] = sums[t].of[p];
  for (int64_t step = 0; step < steps; ++step) {
    typename Form::Weights w[kPanels];
    for (int p = 0; p < kPanels; ++p) w[p] = Form::weights(weights + p * panel_bytes);
    for (int t = 0; t < kTokens; ++t) {
      auto x = reinterpret_cast<const Input*>(inputs + t * input_bytes) + step;
      for (int p = 0; p < kPanels; ++p) Form::add(local[t][p], w[p], x);
    }
    weights += Form::kStepBytes;
    for (int p = 0; p < panels_ahead; ++p) __builtin_prefetch(ahead + p * panel_bytes, 0, 2);
    ahead += Form::kStepBytes;
  }
  for (int t = 0; t < kTokens; ++t)
    for (int p = 0; p < kPanels; ++p) sums[t].of[p] = local[t][p];
}

template <class Form, int kPanels, int kTokens = kTileTokens>
RADIXRT_INLINE void add_tokens(
    int tokens, const char* weights, int64_t panel_bytes, const char* inputs, int64_t input_bytes, int64_t steps, const char* ahead,
    int panels_ahead, TokenSums<kPanels>* sums) {
  if constexpr (kTokens > 1) {
    if (tokens < kTokens)
      return add_tokens<Form, kPanels, kTokens - 1>(tokens, weights, panel_bytes, inputs, input_bytes, steps, ahead, panels_ahead, sums);
  }
  add_steps<Form, kTokens, kPanels>(weights, panel_bytes, inputs, input_bytes, steps, ahead, panels_ahead, sums);
}

// One tile: at most Form::kTokens tokens.
template <class Form, int kPanels>
RADIXRT_INLINE void add_tile(
    int tokens, const char* weights, int64_t panel_bytes, const char* inputs, int64_t input_bytes, int64_t steps, const char* ahead,
    int panels_ahead, TokenSums<kPanels>* sums) {
#if defined(RADIXRT_HAS_AMX)
  if constexpr (Form::kTokens == kAmxTokens) {
    AmxProduct<PairsOfBFloat16> product(tokens);
    product.multiply(true, weights, panel_bytes, kPanels, inputs, input_bytes, steps, {ahead, panels_ahead}, sums);
    return;
  }
#endif
  add_tokens<Form, kPanels>(tokens, weights, panel_bytes, inputs, input_bytes, steps, ahead, panels_ahead, sums);
}

template <class T, class Output, int kPanels>
RADIXRT_INLINE void write(const Linear& linear, int64_t first_panel, int64_t token, const TokenSums<kPanels>& sums) {
  auto bias = static_cast<const T*>(linear.bias);
  auto output = reinterpret_cast<Output*>(linear.output + (linear.places ? linear.places[token] : token) * linear.output_bytes);
  for (int p = 0; p < kPanels; ++p) {
    for (int v = 0; v < kVectors; ++v) {
      int64_t row = (first_panel + p) * kPanel + v * kWidth;
      int64_t left = linear.rows - row;
      Floats x = sums.of[p].of[v];
      if (linear.adds && left > 0) {
        int some = static_cast<int>(left < kWidth ? left : kWidth);
        store_first(output + row, x + load_first(output + row, some), some);
      } else if (left >= kWidth) {
        store(output + row, bias ? x + load(bias + row) : x);
      } else if (left > 0) {
        int some = static_cast<int>(left);
        store_first(output + row, bias ? x + load_first(bias + row, some) : x, some);
      }
    }
  }
}

template <class Form, int kPanels>
RADIXRT_INLINE void finish(const Linear& linear, int64_t first_panel, int64_t token, const TokenSums<kPanels>& sums) {
  using T = typename Form::Weight;
  if (linear.rounds)
    write<T, T>(linear, first_panel, token, sums);
  else
    write<T, float>(linear, first_panel, token, sums);
}

template <class Form, int kPanels>
void multiply_panels(const Linear& linear, int64_t first_panel, int64_t first_token, int tokens) {
  int64_t all_steps = (linear.columns + Form::kColumns - 1) / Form::kColumns;
  int64_t panel_bytes = all_steps * Form::kStepBytes;
  const char* weights = linear.weights + first_panel * panel_bytes;
  int tiles = (tokens + Form::kTokens - 1) / Form::kTokens;
  TokenSums<kPanels> sums[kUnitTokens];
  memset(sums, 0, tokens * sizeof *sums);
  constexpr int64_t kBlock = kBlockBytes / Form::kStepBytes;
  for (int64_t step = 0; step < all_steps; step += kBlock) {
    int64_t steps = all_steps - step < kBlock ? all_steps - step : kBlock;
    const char* block = weights + step * Form::kStepBytes;
    for (int i = 0; i < tiles; ++i) {
      int begin = tokens * i / tiles, end = tokens * (i + 1) / tiles;
      auto inputs = linear.hidden + (first_token + begin) * linear.hidden_bytes + step * sizeof(typename Form::Input);
      // Each tile prefetches a part of the next unit.
      int first_ahead = kPanels * i / tiles, panels_ahead = kPanels * (i + 1) / tiles - first_ahead;
      const char* ahead = block + (kPanels + first_ahead) * panel_bytes;
      add_tile<Form, kPanels>(end - begin, block, panel_bytes, inputs, linear.hidden_bytes, steps, ahead, panels_ahead, sums + begin);
    }
  }
  for (int t = 0; t < tokens; ++t) finish<Form, kPanels>(linear, first_panel, first_token + t, sums[t]);
}

// Up to this number of tokens the hardware prefetcher alone is fastest: software prefetches use its miss buffers. For one token, the
// panels are read one after the other.
constexpr int kUnaidedTokens = 4;

// The outputs of one tile.
template <class Form, int kPanels>
void stream_panels(const Linear& linear, int64_t first_panel, int64_t first_token, int tokens) {
  int64_t steps = (linear.columns + Form::kColumns - 1) / Form::kColumns;
  int64_t panel_bytes = steps * Form::kStepBytes;
  TokenSums<kPanels> sums[Form::kTokens];
  memset(sums, 0, sizeof sums);
  auto inputs = linear.hidden + first_token * linear.hidden_bytes;
  const char* weights = linear.weights + first_panel * panel_bytes;
  add_tile<Form, kPanels>(tokens, weights, panel_bytes, inputs, linear.hidden_bytes, steps, weights, 0, sums);
  for (int t = 0; t < tokens; ++t) finish<Form, kPanels>(linear, first_panel, first_token + t, sums[t]);
}

template <class Form>
void multiply(const Linear& linear, int64_t first_panel, int panels, int64_t first_token, int tokens) {
  if (tokens == 1) {
    for (; panels > 0; --panels) stream_panels<Form, 1>(linear, first_panel++, first_token, 1);
    return;
  }
  while (panels >= kTilePanels) {
    if (tokens <= kUnaidedTokens && tokens <= kTileTokens)
      stream_panels<Form, kTilePanels>(linear, first_panel, first_token, tokens);
    else
      multiply_panels<Form, kTilePanels>(linear, first_panel, first_token, tokens);
    first_panel += kTilePanels;
    panels -= kTilePanels;
  }
  if constexpr (kTilePanels > 1) {
    for (; panels > 0; --panels) multiply_panels<Form, 1>(linear, first_panel++, first_token, tokens);
  }
}

// ------------------------------------------------------------ the table

template <class Form>
int64_t prepared_bytes(int64_t columns) {
  if (Form::used_as_is(columns)) return 0;
  int64_t steps = (columns + Form::kColumns - 1) / Form::kColumns;
  return (steps * static_cast<int64_t>(sizeof(typename Form::Input)) + 63) / 64 * 64;
}

template <class Form>
void prepare(const void* hidden, int64_t columns, void* prepared) {
  Form::prepare(static_cast<const typename Form::Weight*>(hidden), columns, static_cast<typename Form::Input*>(prepared));
}

template <class Form>
void look_up(const char* weights, int64_t columns, int64_t row, void* output) {
  using T = typename Form::Weight;
  int64_t panel_bytes = (columns + Form::kColumns - 1) / Form::kColumns * Form::kStepBytes;
  auto panel = reinterpret_cast<const T*>(weights + row / kPanel * panel_bytes);
  Form::look_up(panel, columns, static_cast<int>(row % kPanel), static_cast<T*>(output));
}

template <class Form>
constexpr LinearKernels::Of kernels_of() {
  return {prepared_bytes<Form>, prepare<Form>, multiply<Form>, look_up<Form>};
}

}  // namespace
}  // namespace RADIXRT_ISA

template <>
const LinearKernels& table_of<LinearKernels, Isa::RADIXRT_ISA>() {
  using namespace RADIXRT_ISA;
  static constexpr LinearKernels table{kernels_of<OneByOne<float>>(), kernels_of<Pairs>(), kernels_of<OneByOne<Float16>>(),
                                       kernels_of<OneByOne<BFloat16>>()};
  return table;
}

}  // namespace radixrt
