// Short convolutions, gated delta rules and state space scans in the order of the tokens; compiled once for each instruction set.
//
// Each lane is a channel or a column, and each sum runs in an order that depends on nothing else. So the bits of a token are the same
// whatever chunk, batch or thread computes it, and a state is the same whatever steps have led to it.
#include "kernels/recurrence.hpp"

#include "isa.hpp"
#include "simd.hpp"

namespace radixrt {
namespace RADIXRT_ISA {
namespace {

constexpr int kVectors = 2;  // of columns in a block: 128 keys by two vectors of 16 columns are 16 KiB
constexpr int kColumns = kVectors * kWidth;
constexpr int kChains = 4;  // partial sums over the keys, since one sum would wait for its last addition

RADIXRT_INLINE Floats rounded(Floats x, const float*) { return x; }
RADIXRT_INLINE Floats rounded(Floats x, const BFloat16*) { return (Floats)(__builtin_convertvector(to_bfloat16(x), UInts) << 16); }
RADIXRT_INLINE Floats rounded(Floats x, const Float16*) { return from_float16(to_float16(x)); }

RADIXRT_INLINE Floats silu(Floats x) { return x / (1.0f + exp(-x)); }

// The first `count` elements of a vector, of which there may be none or more than fit.
template <class T>
RADIXRT_INLINE Floats load_some(const T* from, int64_t count) {
  return count >= kWidth ? load(from) : count > 0 ? load_first(from, static_cast<int>(count)) : splat(0.0f);
}

template <class T>
RADIXRT_INLINE void store_some(T* to, Floats x, int64_t count) {
  if (count >= kWidth)
    store(to, x);
  else if (count > 0)
    store_first(to, x, static_cast<int>(count));
}

// ------------------------------------------------------------ convolution

// Up to a vector of channels. One function for all: a copy for the last ones could be compiled to other roundings.
template <class T, int taps>
__attribute__((noinline)) void convolve_channels(const Convolution& c, int64_t channel, int64_t count) {
  auto states = static_cast<T*>(c.states) + channel;
  const int64_t row_size = (taps - 1) * c.all_channels;
  Floats last[taps], weight[taps];  // last[taps - 1] is the newest input
  for (int tap = 0; tap < taps; ++tap)
    weight[tap] = load_some(static_cast<const T*>(c.weight) + tap * c.all_channels + channel, count);
  for (int tap = 1; tap < taps; ++tap) last[tap] = load_some(states + c.row * row_size + (tap - 1) * c.all_channels, count);
  const Floats bias = c.bias ? load_some(static_cast<const T*>(c.bias) + channel, count) : splat(0.0f);
  auto save = [&](int64_t row) {
    for (int tap = 1; tap < taps; ++tap) store_some(states + row * row_size + (tap - 1) * c.all_channels, last[tap], count);
  };
  int64_t token = c.first;
  for (int64_t keep = 0; keep <= c.keeps.count; ++keep) {
    const int64_t end = keep < c.keeps.count ? c.keeps.ends[keep] : c.end;
    for (; token < end; ++token) {
      Floats x = load_some(static_cast<const T*>(c.inputs) + token * c.input_stride + channel, count);
      if (c.before) x = rounded(x * load_some(static_cast<const T*>(c.before) + token * c.before_stride + channel, count), states);
      for (int tap = 1; tap < taps; ++tap) last[tap - 1] = last[tap];
      last[taps - 1] = x;
      Floats sum = bias;
      for (int tap = 0; tap < taps; ++tap) sum = sum + weight[tap] * last[tap];
      if (c.silu) sum = silu(sum);
      if (c.after) sum = rounded(sum, states) * load_some(static_cast<const T*>(c.after) + token * c.after_stride + channel, count);
      store_some(static_cast<T*>(c.outputs) + token * c.output_stride + channel, sum, count);
    }
    save(keep < c.keeps.count ? c.keeps.rows[keep] : c.row);
  }
}

template <class T, int taps>
void convolve_taps(const Convolution& c) {
  int64_t channel = 0;
  for (; channel + kWidth <= c.channels; channel += kWidth) convolve_channels<T, taps>(c, channel, kWidth);
  if (channel < c.channels) convolve_channels<T, taps>(c, channel, c.channels - channel);
}

template <class T>
void convolve(const Convolution& c) {
  switch (c.taps) {
    case 2: return convolve_taps<T, 2>(c);
    case 3: return convolve_taps<T, 3>(c);
    default: return convolve_taps<T, 4>(c);
  }
}

// ------------------------------------------------------------ scan

RADIXRT_INLINE Floats total(const Floats (&parts)[kChains]) {
  static_assert(kChains == 4);
  return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

// Advances a block of columns by one token. `matrix` [keys, ..] is multiplied by `decay`, gets the outer product of `key` and the
// vector `added`, and is multiplied by `query`. Keys are padded with zeros to a multiple of kChains.
template <bool corrects>
RADIXRT_INLINE void advance_block(float* matrix, int64_t stride, int64_t keys, const float* key, const float* query, float decay,
                                  float gain, const Floats (&value)[kVectors], Floats (&result)[kVectors]) {
  Floats added[kVectors];
  if constexpr (corrects) {
    Floats parts[kVectors][kChains] = {};
    for (int64_t row = 0; row < keys; row += kChains)
#pragma GCC unroll 4
      for (int chain = 0; chain < kChains; ++chain)
        for (int v = 0; v < kVectors; ++v)
          parts[v][chain] = parts[v][chain] + load(matrix + (row + chain) * stride + v * kWidth) * key[row + chain];
    for (int v = 0; v < kVectors; ++v) added[v] = gain * (value[v] - decay * total(parts[v]));
  } else {
    for (int v = 0; v < kVectors; ++v) added[v] = gain * value[v];
  }
  Floats parts[kVectors][kChains] = {};
  for (int64_t row = 0; row < keys; row += kChains)
#pragma GCC unroll 4
    for (int chain = 0; chain < kChains; ++chain)
      for (int v = 0; v < kVectors; ++v) {
        float* place = matrix + (row + chain) * stride + v * kWidth;
        Floats kept = load(place) * decay;
        kept = kept + added[v] * key[row + chain];
        store(place, kept);
        parts[v][chain] = parts[v][chain] + kept * query[row + chain];
      }
  for (int v = 0; v < kVectors; ++v) result[v] = total(parts[v]);
}

// Writes `size` elements times `scale` as float32, and zeros up to `padded`.
template <class T>
RADIXRT_INLINE void scaled(const T* from, int64_t size, int64_t padded, const float* scale, float* to) {
  const float factor = scale ? *scale : 1.0f;
  for (int64_t i = 0; i < padded; i += kWidth) store(to + i, load_some(from + i, size - i) * factor);
}

// Copies a block of columns between a state and a dense block. Rows that the state lacks are zeros.
RADIXRT_INLINE void copy_in(const float* from, int64_t stride, int64_t keys, int64_t padded, int64_t columns, float* block) {
  for (int64_t key = 0; key < padded; ++key)
    for (int v = 0; v < kVectors; ++v)
      store(block + key * kColumns + v * kWidth,
            key < keys ? load_some(from + key * stride + v * kWidth, columns - v * kWidth) : splat(0.0f));
}

RADIXRT_INLINE void copy_out(const float* block, int64_t keys, int64_t columns, float* to, int64_t stride) {
  for (int64_t key = 0; key < keys; ++key)
    for (int v = 0; v < kVectors; ++v)
      store_some(to + key * stride + v * kWidth, load(block + key * kColumns + v * kWidth), columns - v * kWidth);
}

template <class T, bool corrects>
RADIXRT_INLINE void scan(const Scan& s) {
  // Rows of a state are some hundred bytes apart, which would use a few sets of the first-level cache only. One token alone reads
  // its block in place.
  alignas(64) float block[kMaxKeys * kColumns], key[kMaxKeys + kWidth], query[kMaxKeys + kWidth];
  const int64_t padded = (s.keys + kChains - 1) / kChains * kChains;
  float* own = s.states + s.row * s.row_stride;
  const bool in_place = s.end - s.first == 1 && s.columns == kColumns && padded == s.keys;
  float* matrix = in_place ? own : block;
  const int64_t stride = in_place ? s.all_columns : kColumns;
  if (!in_place) copy_in(own, s.all_columns, s.keys, padded, s.columns, block);
  int64_t token = s.first;
  for (int64_t keep = 0; keep <= s.keeps.count; ++keep) {
    const int64_t end = keep < s.keeps.count ? s.keeps.ends[keep] : s.end;
    for (; token < end; ++token) {
      const int64_t scale = token * s.scale_stride;
      scaled(static_cast<const T*>(s.key) + token * s.key_stride, s.keys, padded, s.key_scale ? s.key_scale + scale : nullptr, key);
      scaled(static_cast<const T*>(s.query) + token * s.query_stride, s.keys, padded, s.query_scale ? s.query_scale + scale : nullptr,
             query);
      Floats value[kVectors], result[kVectors];
      auto from = static_cast<const T*>(s.value) + token * s.value_stride;
      for (int v = 0; v < kVectors; ++v) value[v] = load_some(from + v * kWidth, s.columns - v * kWidth);
      advance_block<corrects>(matrix, stride, padded, key, query, s.decay[token * s.head_stride], s.gain[token * s.head_stride], value,
                              result);
      auto to = static_cast<T*>(s.outputs) + token * s.output_stride;
      for (int v = 0; v < kVectors; ++v) {
        if constexpr (!corrects) result[v] = result[v] + s.skip * value[v];
        store_some(to + v * kWidth, result[v], s.columns - v * kWidth);
      }
    }
    if (keep < s.keeps.count) {
      float* other = s.states + s.keeps.rows[keep] * s.row_stride;
      if (in_place)
        for (int64_t row = 0; row < s.keys; ++row)
          for (int v = 0; v < kVectors; ++v) store(other + row * stride + v * kWidth, load(own + row * stride + v * kWidth));
      else
        copy_out(block, s.keys, s.columns, other, s.all_columns);
    }
  }
  if (!in_place) copy_out(block, s.keys, s.columns, own, s.all_columns);
}

template <class T>
void advance(const Scan& s) {
  s.corrects ? scan<T, true>(s) : scan<T, false>(s);
}

// ------------------------------------------------------------ norms

template <class T>
float inverse_norm(const void* row, int64_t size, float eps) {
  auto from = static_cast<const T*>(row);
  Floats squares = splat(0.0f);
  for (int64_t i = 0; i < size; i += kWidth) {
    Floats x = load_some(from + i, size - i);
    squares = squares + x * x;
  }
  return 1.0f / __builtin_sqrtf(sum(squares) + eps);
}

template <class T>
void gated_norm(const void* row, const void* gate_row, const void* weight_row, void* output_row, int64_t size, float eps,
                bool gate_first) {
  auto from = static_cast<const T*>(row), gate = static_cast<const T*>(gate_row), weight = static_cast<const T*>(weight_row);
  auto output = static_cast<T*>(output_row);
  auto gated = [&](int64_t i) { return load_some(from + i, size - i) * silu(load_some(gate + i, size - i)); };
  if (!weight) {
    for (int64_t i = 0; i < size; i += kWidth) store_some(output + i, gated(i), size - i);
    return;
  }
  Floats squares = splat(0.0f);
  for (int64_t i = 0; i < size; i += kWidth) {
    Floats x = gate_first ? gated(i) : load_some(from + i, size - i);
    squares = squares + x * x;
  }
  const float factor = 1.0f / __builtin_sqrtf(sum(squares) / size + eps);
  for (int64_t i = 0; i < size; i += kWidth) {
    Floats w = load_some(weight + i, size - i);
    Floats x = gate_first ? rounded(gated(i) * factor, from) * w
                          : rounded(rounded(load_some(from + i, size - i) * factor, from) * w, from) * silu(load_some(gate + i, size - i));
    store_some(output + i, x, size - i);
  }
}

template <class T>
constexpr RecurrenceKernels::OfType of_type() {
  return {convolve<T>, advance<T>, inverse_norm<T>, gated_norm<T>};
}

}  // namespace
}  // namespace RADIXRT_ISA

template <>
const RecurrenceKernels& table_of<RecurrenceKernels, Isa::RADIXRT_ISA>() {
  using namespace RADIXRT_ISA;
  static constexpr RecurrenceKernels table{of_type<float>(), of_type<BFloat16>(), of_type<Float16>(), kColumns};
  return table;
}

}  // namespace radixrt
