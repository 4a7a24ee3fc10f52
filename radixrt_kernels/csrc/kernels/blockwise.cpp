// Products of activations and a packed matrix of GGUF blocks; compiled once for each instruction set.
//
// A record of a tile's panels stays in the first-level cache while all tokens are multiplied by it. Few tokens: codes are unpacked in
// registers. Many tokens: the codes are unpacked once, to memory, in the form that they are multiplied in. The sums of a token are the same in
// both.
#include "kernels/blockwise.hpp"

#include "isa.hpp"
#include "kernels/block_kinds.hpp"
#include "kernels/byte_products.hpp"

namespace radixrt {
namespace RADIXRT_ISA {
namespace {

constexpr int kSteps = kBlock / 4;

// ------------------------------------------------------------ activations
//
// The prepared form of a token: scale and sums of each 32 columns, then the activations.

struct BlockInput {
  float scale;
  float scaled_total;  // the scale times the sum of the integers
  int32_t total;       // the sum of the integers
  int32_t second;      // that of the last 16 columns
#if defined(RADIXRT_HAS_PAIRS)
  // Sums of the integers of the first and of the last 16 columns, in 16 bits: of columns 0, 1, 4, 5, ..., and of the other columns.
  int16_t halves[2][2];
#endif
};

RADIXRT_INLINE BlockInput block_input(float scale, Floats first, Floats second) {
  float total = sum(first + second);
  BlockInput input{};
  input.scale = scale;
  input.scaled_total = scale * total;
  input.total = static_cast<int32_t>(total);
  input.second = static_cast<int32_t>(sum(second));
#if defined(RADIXRT_HAS_PAIRS)
  for (int half = 0; half < 2; ++half) {
    Floats x = half ? second : first;
    for (int i = 0; i < 2; ++i) input.halves[half][i] = static_cast<int16_t>(x[2 * i] + x[2 * i + 1] + x[2 * i + 4] + x[2 * i + 5]);
  }
#endif
  return input;
}

RADIXRT_INLINE int64_t header_bytes(int64_t blocks) { return (blocks * static_cast<int64_t>(sizeof(BlockInput)) + 63) / 64 * 64; }

RADIXRT_INLINE Activations activations_at(const void* prepared, int64_t columns) {
  return {static_cast<char*>(const_cast<void*>(prepared)) + header_bytes(columns / kBlock), columns};
}

int64_t prepared_bytes(int64_t columns) { return header_bytes(columns / kBlock) + Activations::bytes(columns); }

template <class T>
void prepare(const void* hidden, int64_t columns, void* prepared) {
  int64_t blocks = columns / kBlock;
  auto from = static_cast<const T*>(hidden);
  auto to = static_cast<BlockInput*>(prepared);
  Activations rounded = activations_at(prepared, columns);
  for (int64_t block = 0; block < blocks; ++block, from += kBlock) {
    ActivationScale scale = scale_of(from, kBlock);
    Floats first = round_to_bytes(from, kBlock / 2, scale.inverse, rounded, block * kBlock);
    Floats second = round_to_bytes(from + kBlock / 2, kBlock / 2, scale.inverse, rounded, block * kBlock + kBlock / 2);
    to[block] = block_input(scale.scale, first, second);
  }
}

// ------------------------------------------------------------ sums of a group
//
// The products of codes minus the code of 0 (plain codes if there is a minimum) with the activations of the columns that share a scale.

template <class Kind>
constexpr int32_t kZeroOf = Kind::kHasMinimum ? 0 : Kind::kZero;

template <class Kind, bool kInPairs>
struct GroupSums {
  static constexpr int kGroupSteps = kSteps / Kind::kGroups;
  static constexpr int kMostSteps = Products<Kind::kLargest>::kRun, kRun = kMostSteps < kGroupSteps ? kMostSteps : kGroupSteps;
  Products<Kind::kLargest> products;

  static RADIXRT_INLINE Ints first(const BlockInput& input, int group, int32_t zero) {
    if constexpr (Kind::kHasMinimum) return Ints{};
    return Ints{} + (group ? input.second : Kind::kGroups == 2 ? input.total - input.second : input.total) * -zero;
  }
  RADIXRT_INLINE void begin(Ints first) { products.sums = first; }
  template <class Codes, class Four>
  RADIXRT_INLINE void add(int step, const Codes& codes, const Four& x) {
    products.add(step, kRun, codes, x);
  }
  RADIXRT_INLINE Ints complete() const { return products.sums; }
};

#if defined(RADIXRT_HAS_PAIRS)
// The sums of all steps in 16 bits, so that two vectors of four tokens take eight registers.
template <class Kind>
struct GroupSums<Kind, true> {
  __m256i sums;

  static RADIXRT_INLINE __m256i first(const BlockInput& input, int group, int32_t zero) {
    int32_t halves[2];
    memcpy(halves, input.halves, sizeof halves);
    __m256i total = _mm256_set1_epi32(halves[group]);
    if constexpr (Kind::kGroups == 1) total = _mm256_add_epi16(total, _mm256_set1_epi32(halves[1]));
    return _mm256_mullo_epi16(total, _mm256_set1_epi16(static_cast<int16_t>(-zero)));
  }
  RADIXRT_INLINE void begin(__m256i first) { sums = first; }
  RADIXRT_INLINE void add(int step, const Operands<true>::Codes& codes, const Operands<true>::Four& x) {
    __m256i products = pairs_of(codes.bytes, x.bytes);
    sums = step == 0 && Kind::kHasMinimum ? products : add_shorts_now(sums, products);
  }
  RADIXRT_INLINE Ints complete() const { return whole_of(sums); }
};

// Whether the sums of a group fit in 16 bits. Those of some of its steps need not: they are modulo 2^16.
template <class Kind>
constexpr bool pairs_fit() {
  constexpr int kZero = kZeroOf<Kind>, kReach = kZero > Kind::kLargest - kZero ? kZero : Kind::kLargest - kZero;
  return kInBytes<Kind::kLargest> && kReach * 2 * 127 * (kSteps / Kind::kGroups) < 1 << 15;
}
template <class Kind>
constexpr bool kPairsFit = pairs_fit<Kind>();
#else
template <class Kind>
constexpr bool kPairsFit = false;
#endif

// ------------------------------------------------------------ records of some panels

template <class Kind_>
struct Packed {
  using Kind = Kind_;
  using Multiplied = OperandsOf<Kind::kLargest>;
  static constexpr bool kInRegisters = true, kInPairs = kPairsFit<Kind>;
  static constexpr int32_t zero = kZeroOf<Kind>;
  const uint8_t *scales, *lines;  // of the first panel
  int64_t panel_bytes;

  RADIXRT_INLINE UInts packed_codes(int panel, int block, int step, int lane) const {
    return Kind::codes(lines + panel * panel_bytes + block * (Kind::kLines * kStepBytes) + 4 * lane, step);
  }
  RADIXRT_INLINE auto codes(int panel, int block, int step, int lane) const {
    return Multiplied::codes(packed_codes(panel, block, step, lane));
  }
  RADIXRT_INLINE Floats scale(int panel, int block, int group, int lane) const {
    return Kind::scale(scales + panel * panel_bytes, block, group, lane);
  }
  RADIXRT_INLINE Floats minimum(int panel, int block, int group, int lane) const {
    return Kind::minimum(scales + panel * panel_bytes, block, group, lane);
  }
};

RADIXRT_INLINE int blocks_of_record(const Blockwise& matrix, int64_t record) {
  int64_t left = matrix.blocks() - record * kRecordBlocks;
  return static_cast<int>(left < kRecordBlocks ? left : kRecordBlocks);
}

template <class Kind>
RADIXRT_INLINE Packed<Kind> record_at(const Blockwise& matrix, int64_t panel, int64_t record) {
  const uint8_t* at = matrix.panels + panel * matrix.panel_bytes + record * matrix.form->record_bytes(kRecordBlocks);
  return {at, at + matrix.form->scale_bytes(blocks_of_record(matrix, record)), matrix.panel_bytes};
}

// What the products of unpacked codes depend on. Kinds that have it in common share the loops for many tokens: there are 17 kinds, and the
// loops take most of the compiler's time.
template <int kGroups_, bool kHasMinimum_, int kLargest_, bool kPairsFit_>
struct Arithmetic {
  static constexpr int kGroups = kGroups_, kLargest = kLargest_;
  static constexpr bool kHasMinimum = kHasMinimum_, kPairsFit = kPairsFit_;
};

// The largest code that is multiplied like `largest`.
constexpr int like(int largest, bool pairs_fit) {
  if (!(kHasBytes && kHasShorts) || largest >= 130) return 255;
  return pairs_fit || largest <= 16 ? 16 : largest <= 32 ? 32 : largest <= 64 ? 64 : 129;
}

template <class Kind>
using ArithmeticOf = Arithmetic<Kind::kGroups, Kind::kHasMinimum, like(Kind::kLargest, kPairsFit<Kind>), kPairsFit<Kind>>;

template <class Kind_, int kPanels>
struct Unpacked {
  using Kind = Kind_;  // an Arithmetic
  using Multiplied = OperandsOf<Kind::kLargest>;
  static constexpr bool kInRegisters = false, kInPairs = Kind::kPairsFit;
  // Wide vectors take most time to read codes, narrow ones to split them.
  static constexpr bool kSplit = kWidth < 16 && !kInBytes<Kind::kLargest>;
  int32_t zero;
  alignas(64) uint8_t bytes[kPanels][kRecordBlocks][kSteps][(kSplit ? 2 : 1) * kStepBytes];  // 16 KiB for four panels
  float scales[kPanels][kRecordBlocks][Kind::kGroups][kPanel];
  float minima[kPanels][kRecordBlocks][Kind::kGroups][Kind::kHasMinimum ? kPanel : 1];

  template <class From>
  RADIXRT_INLINE void fill(const Packed<From>& from, int blocks) {
    zero = from.zero;
    for (int p = 0; p < kPanels; ++p) {
      for (int block = 0; block < blocks; ++block) {
        for (int lane = 0; lane < kPanel; lane += kWidth) {
#pragma GCC unroll 8
          for (int step = 0; step < kSteps; ++step) {
            if constexpr (kSplit) {
              auto codes = from.codes(p, block, step, lane);
              memcpy(bytes[p][block][step] + 8 * lane, &codes, sizeof codes);
            } else {
              UInts codes = from.packed_codes(p, block, step, lane);
              memcpy(bytes[p][block][step] + 4 * lane, &codes, sizeof codes);
            }
          }
          for (int group = 0; group < Kind::kGroups; ++group) {
            store(scales[p][block][group] + lane, from.scale(p, block, group, lane));
            if constexpr (Kind::kHasMinimum) store(minima[p][block][group] + lane, from.minimum(p, block, group, lane));
          }
        }
      }
    }
  }

  RADIXRT_INLINE auto codes(int panel, int block, int step, int lane) const {
    if constexpr (kSplit) {
      typename Multiplied::Codes codes;
      memcpy(&codes, bytes[panel][block][step] + 8 * lane, sizeof codes);
      return codes;
    } else {
      return Multiplied::codes(codes_at(bytes[panel][block][step] + 4 * lane));
    }
  }
  RADIXRT_INLINE Floats scale(int panel, int block, int group, int lane) const { return load(scales[panel][block][group] + lane); }
  RADIXRT_INLINE Floats minimum(int panel, int block, int group, int lane) const { return load(minima[panel][block][group] + lane); }
};

// Prefetches `bytes` bytes of each panel, some lines at a time between other work.
struct Ahead {
  const uint8_t* panel;
  int64_t panel_bytes;
  int bytes, panels;
  int lines_a_step;
  int at = 0;

  RADIXRT_INLINE void step() {
    for (int i = 0; i < lines_a_step && panels > 0; ++i) {
      __builtin_prefetch(panel + at, 0, 2);
      at += 64;
      if (at >= bytes) {
        at = 0;
        panel += panel_bytes;
        --panels;
      }
    }
  }
};

// ------------------------------------------------------------ tiles

// The inputs of a tile, from some block on.
struct Inputs {
  const char* blocks;  // BlockInput of the first token
  const char* fours;   // in the form that the codes are multiplied with
  int64_t token_bytes;

  RADIXRT_INLINE const BlockInput& block(int token, int index) const {
    return reinterpret_cast<const BlockInput*>(blocks + token * token_bytes)[index];
  }
  template <class Four>
  RADIXRT_INLINE const Four* steps(int token, int index) const {
    return reinterpret_cast<const Four*>(fours + token * token_bytes) + index * kSteps;
  }
};

template <class Kind>
RADIXRT_INLINE float scaled_total(const BlockInput& input, int group) {
  if constexpr (Kind::kGroups == 1) return input.scaled_total;
  return input.scale * static_cast<float>(group ? input.second : input.total - input.second);
}

// Adds the products of 32 columns and `kAtOnce` panels from `first` on to the sums of `kTokens` tokens.
template <int kTokens, int kAtOnce, int kPanels, class Record>
RADIXRT_INLINE void add_block(const Record& record, int block, int first, const Inputs& inputs, TokenSums<kPanels>* sums) {
  using Kind = typename Record::Kind;
  using Four = typename Record::Multiplied::Four;
  constexpr int kGroupSteps = kSteps / Kind::kGroups;
#pragma GCC unroll 2
  for (int group = 0; group < Kind::kGroups; ++group) {
    using Sums = GroupSums<Kind, Record::kInPairs>;
    Sums products[kTokens][kAtOnce][kVectors];
    const Four* x[kTokens];
    for (int t = 0; t < kTokens; ++t) {
      auto start = Sums::first(inputs.block(t, block), group, record.zero);
      for (int p = 0; p < kAtOnce; ++p)
        for (int v = 0; v < kVectors; ++v) products[t][p][v].begin(start);
      x[t] = inputs.steps<Four>(t, block) + group * kGroupSteps;
    }
#pragma GCC unroll 8
    for (int step = 0; step < kGroupSteps; ++step) {
      typename Record::Multiplied::Codes w[kAtOnce][kVectors];
      for (int p = 0; p < kAtOnce; ++p)
        for (int v = 0; v < kVectors; ++v) w[p][v] = record.codes(first + p, block, group * kGroupSteps + step, v * kWidth);
      for (int t = 0; t < kTokens; ++t)
        for (int p = 0; p < kAtOnce; ++p)
          for (int v = 0; v < kVectors; ++v) products[t][p][v].add(step, w[p][v], x[t][step]);
    }
    float totals[kTokens];
    if constexpr (Kind::kHasMinimum) {
      for (int t = 0; t < kTokens; ++t) totals[t] = scaled_total<Kind>(inputs.block(t, block), group);
    }
    for (int p = 0; p < kAtOnce; ++p) {
      for (int v = 0; v < kVectors; ++v) {
        Floats scale = record.scale(first + p, block, group, v * kWidth);
        for (int t = 0; t < kTokens; ++t)
          sums[t].of[first + p][v] += __builtin_convertvector(products[t][p][v].complete(), Floats) * (scale * inputs.block(t, block).scale);
        if constexpr (Kind::kHasMinimum) {
          Floats minimum = record.minimum(first + p, block, group, v * kWidth);
          for (int t = 0; t < kTokens; ++t) sums[t].of[first + p][v] -= minimum * totals[t];
        }
      }
    }
  }
}

// Up to this number of tokens, unpacking to memory would take longer than it saves.
template <class Kind>
constexpr int kFewTokensOf = (kWidth == 8 && Kind::kLines > 4 ? 1 : 2) * kTileTokens;

// The largest tile with codes in registers (few tokens) or in memory.
template <class Kind, bool kFew>
struct Tile {
  static constexpr bool kPairs = kWidth == 8 && !kFew && !kInBytes<Kind::kLargest>;  // shorts take more loads: fewer with two panels
  static constexpr int kTokens = kPairs ? 3 : kTileTokens, kPanels = kPairs ? 2 : kTilePanels;
};

// One tile: at most `kTokens` tokens.
template <int kPanels, int kTokens, class Record>
RADIXRT_INLINE void add_tile(
    const Record& record, int blocks, int tokens, const Inputs& inputs, Ahead& ahead, TokenSums<kPanels>* sums) {
  if constexpr (kTokens > 1) {
    if (tokens < kTokens) return add_tile<kPanels, kTokens - 1>(record, blocks, tokens, inputs, ahead, sums);
  }
  for (int block = 0; block < blocks; ++block) {
    ahead.step();
    // With two groups and codes in registers, several panels at once need more registers than there are.
    constexpr int kAtOnce = Record::kInRegisters && Record::Kind::kGroups == 2 ? 1 : kPanels;
#pragma GCC unroll 4
    for (int first = 0; first < kPanels; first += kAtOnce) add_block<kTokens, kAtOnce>(record, block, first, inputs, sums);
  }
}

template <int kPanels, int kTokens, class Record>
void add_tiles(
    const Record& __restrict record, int blocks, int tokens, int tiles, const Inputs& inputs, Ahead ahead, TokenSums<kPanels>* __restrict sums) {
  for (int i = 0; i < tiles; ++i) {
    int begin = tokens * i / tiles, end = tokens * (i + 1) / tiles;
    Inputs own{inputs.blocks + begin * inputs.token_bytes, inputs.fours + begin * inputs.token_bytes, inputs.token_bytes};
    add_tile<kPanels, kTokens>(record, blocks, end - begin, own, ahead, sums + begin);
  }
}

// Adds the products of a record of `kPanels` panels to the sums of `tokens` tokens. `ahead_at` is the record to prefetch meanwhile.
template <class Kind, bool kFew, int kPanels>
void add_record(
    const Blockwise& matrix, int64_t panel, int64_t record, const uint8_t* ahead_at, const char* inputs, int tokens, TokenSums<kPanels>* sums) {
  constexpr int kTokens = Tile<Kind, kFew>::kTokens;
  int tiles = (tokens + kTokens - 1) / kTokens, blocks = blocks_of_record(matrix, record);
  auto record_bytes = static_cast<int>(matrix.form->record_bytes(kRecordBlocks));
  auto packed = record_at<Kind>(matrix, panel, record);
  Ahead ahead{ahead_at, matrix.panel_bytes, record_bytes, kPanels, (kPanels * record_bytes / 64 + tiles * blocks - 1) / (tiles * blocks)};
  auto fours = activations_at(inputs, matrix.columns).template fours<kInBytes<Kind::kLargest>>();
  Inputs own{inputs + record * kRecordBlocks * static_cast<int64_t>(sizeof(BlockInput)),
             reinterpret_cast<const char*>(fours + record * kRecordBlocks * kSteps), matrix.input_bytes};
  if constexpr (kFew) {
    add_tiles<kPanels, kTokens>(packed, blocks, tokens, tiles, own, ahead, sums);
  } else {
    Unpacked<ArithmeticOf<Kind>, kPanels> unpacked;
    unpacked.fill(packed, blocks);
    add_tiles<kPanels, kTokens>(unpacked, blocks, tokens, tiles, own, ahead, sums);
  }
}

// For many tokens, the panels of a unit take turns at each record, so that they find its inputs in the second-level cache.
template <class T, class Kind, bool kFew, int kPanels = Tile<Kind, kFew>::kPanels>
void multiply_panels(const Blockwise& matrix, int64_t panel, int panels, int64_t first_token, int tokens) {
  constexpr int kTurns = kFew ? 1 : kUnitPanels / kPanels;
  // The work on one record is longer than the latency of the memory only for many tokens.
  const int64_t distance = tokens <= kFewTokens ? 4 / kTurns : 1;
  const char* inputs = matrix.inputs + first_token * matrix.input_bytes;
  int64_t records = (matrix.blocks() + kRecordBlocks - 1) / kRecordBlocks;
  while (panels >= kPanels) {
    int turns = panels / kPanels < kTurns ? panels / kPanels : kTurns;
    TokenSums<kPanels> sums[kTurns][kFew ? kFewTokensOf<Kind> : kUnitTokens];
    for (int turn = 0; turn < turns; ++turn) memset(sums[turn], 0, tokens * sizeof *sums[turn]);
    for (int64_t record = 0; record < records; ++record) {
      int64_t later = record + distance;
      for (int turn = 0; turn < turns; ++turn) {
        int64_t at = panel + turn * kPanels;
        auto ahead = record_at<Kind>(matrix, at + later / records * turns * kPanels, later % records);
        add_record<Kind, kFew, kPanels>(matrix, at, record, ahead.scales, inputs, tokens, sums[turn]);
      }
    }
    for (int turn = 0; turn < turns; ++turn)
      for (int t = 0; t < tokens; ++t) finish<T>(matrix, panel + turn * kPanels, first_token + t, sums[turn][t]);
    panels -= turns * kPanels;
    panel += turns * kPanels;
  }
  if constexpr (kPanels > 1) {
    if (panels > 0) multiply_panels<T, Kind, kFew, 1>(matrix, panel, panels, first_token, tokens);
  }
}

template <class T>
void multiply(const Blockwise& matrix, int64_t first_panel, int panels, int64_t first_token, int tokens) {
  with_kind(matrix.form->kind, [&](auto kind) {
    using Kind = decltype(kind);
    if (tokens <= kFewTokensOf<Kind>) multiply_panels<T, Kind, true>(matrix, first_panel, panels, first_token, tokens);
    else multiply_panels<T, Kind, false>(matrix, first_panel, panels, first_token, tokens);
  });
}

// ------------------------------------------------------------ rows of an embedding

template <class Kind>
void decode_block(const Blockwise& matrix, int64_t row, int64_t index, float* to) {
  auto record = record_at<Kind>(matrix, row / kPanel, index / kRecordBlocks);
  auto block = static_cast<int>(index % kRecordBlocks);
  auto in_panel = static_cast<int>(row % kPanel);
  int first = in_panel / kWidth * kWidth, lane = in_panel % kWidth;
  for (int step = 0; step < kSteps; ++step) {
    int group = step * Kind::kGroups / kSteps;
    float scale = record.scale(0, block, group, first)[lane], minimum = 0;
    if constexpr (Kind::kHasMinimum) minimum = record.minimum(0, block, group, first)[lane];
    uint32_t four = record.packed_codes(0, block, step, first)[lane];
    for (int i = 0; i < 4; ++i) {
      float weight = scale * static_cast<float>(static_cast<int>(four >> 8 * i & 255) - Kind::kZero);  // exact
      to[4 * step + i] = Kind::kHasMinimum ? weight - minimum : weight;
    }
  }
}

template <class T>
void look_up(const Blockwise& matrix, int64_t row, void* output) {
  auto to = static_cast<T*>(output);
  with_kind(matrix.form->kind, [&](auto kind) {
    for (int64_t block = 0; block < matrix.blocks(); ++block, to += kBlock) {
      float weights[kBlock];
      decode_block<decltype(kind)>(matrix, row, block, weights);
      for (int i = 0; i < kBlock; i += kWidth) store(to + i, load(weights + i));
    }
  });
}

template <class T>
constexpr BlockwiseKernels::Of kernels_of() {
  return {prepare<T>, multiply<T>, look_up<T>};
}

}  // namespace
}  // namespace RADIXRT_ISA

template <>
const BlockwiseKernels& table_of<BlockwiseKernels, Isa::RADIXRT_ISA>() {
  using namespace RADIXRT_ISA;
  static constexpr BlockwiseKernels table{prepared_bytes, kernels_of<float>(), kernels_of<BFloat16>(), kernels_of<Float16>()};
  return table;
}

}  // namespace radixrt
