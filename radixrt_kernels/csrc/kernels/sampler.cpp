// Samples the next token of one row of logits; compiled once for each instruction set.
//
// Rows are not sorted. Top-k and top-p become a threshold on the logits. Only logits above a bound, computed from the maxima of
// blocks, are sorted. The draw is the largest sum of logit and Gumbel noise (radixrt.worker.sampling.noise). For most tokens the maximum
// possible noise is too small, so their logarithms are not computed.
#include "kernels/sampler.hpp"

#include "isa.hpp"
#include "simd.hpp"

namespace radixrt {
namespace RADIXRT_ISA {
namespace {

constexpr int64_t kBlock = 64;         // logits per maximum
constexpr int64_t kFirstBlocks = 256;  // blocks that top-p searches before the whole row
constexpr int kBins = 1024;
constexpr float kBinsPerUnit = 16;

const float kNothing = -__builtin_inff();

int64_t blocks_of(int64_t vocab) { return (vocab + kBlock - 1) / kBlock; }

// The row, padded to whole blocks; the maxima of its blocks; a copy of them, or of the sorted values.
int64_t scratch_floats(int64_t vocab) { return 2 * blocks_of(vocab) * kBlock + blocks_of(vocab) + kBlock; }

// ------------------------------------------------------------ small sorting

RADIXRT_INLINE float larger(float a, float b) { return a > b ? a : b; }

RADIXRT_INLINE void swap(float& a, float& b) {
  float held = a;
  a = b;
  b = held;
}

// Partitions begin..end: values >= pivot before values <= pivot. Both parts are smaller than the whole.
float* split(float* begin, float* end) {
  float a = *begin, b = begin[(end - begin) / 2], c = end[-1];
  float pivot = a > b ? (b > c ? b : a > c ? c : a) : (a > c ? a : b > c ? c : b);
  --begin;
  while (true) {
    do ++begin;
    while (*begin > pivot);
    do --end;
    while (*end < pivot);
    if (begin >= end) return end + 1;
    swap(*begin, *end);
  }
}

void sort_descending(float* begin, float* end) {
  while (end - begin > 16) {
    float* middle = split(begin, end);
    sort_descending(middle, end);
    end = middle;
  }
  for (float* at = begin + 1; at < end; ++at) {
    float value = *at;
    float* to = at;
    for (; to > begin && to[-1] < value; --to) *to = to[-1];
    *to = value;
  }
}

// The value at `rank` (from 0) of begin..end in descending order.
float select(float* begin, float* end, int64_t rank) {
  float* wanted = begin + rank;
  while (end - begin > 16) {
    float* middle = split(begin, end);
    if (wanted < middle) end = middle;
    else begin = middle;
  }
  sort_descending(begin, end);
  return *wanted;
}

// ------------------------------------------------------------ a row

struct Row {
  float* values;   // logits divided by temperature, or minus infinity; whole blocks
  float* maxima;   // of blocks
  float* spare;    // as long as values
  int64_t blocks;
  float most;
  int64_t first_most;
};

RADIXRT_INLINE UInts lanes() {
  UInts numbers;
  for (int i = 0; i < kWidth; ++i) numbers[i] = i;
  return numbers;
}

RADIXRT_INLINE bool any(Ints condition) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)condition, (__m512i)condition) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)condition, (__m256i)condition);
#else
  int found = 0;
  for (int i = 0; i < kWidth; ++i) found |= condition[i];
  return found != 0;
#endif
}

RADIXRT_INLINE Floats allowed_only(Floats x, const uint32_t* allowed, int64_t first) {
  UInts bits = (allowed[first / 32] >> (first % 32) >> lanes()) & 1u;
  return bits != 0u ? x : splat(kNothing);
}

Row read(const SampledRow& row, float* scratch, float* peak) {
  Row r;
  Floats largest_of_all = splat(kNothing), odd = splat(0);
  r.blocks = blocks_of(row.vocab);
  r.values = scratch;
  r.spare = scratch + r.blocks * kBlock;
  r.maxima = r.spare + r.blocks * kBlock;
  r.most = kNothing;
  r.first_most = 0;
  for (int64_t block = 0; block < r.blocks; ++block) {
    Floats most = splat(kNothing);
    for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += kWidth) {
      Floats x = splat(kNothing);
      int64_t left = row.vocab - i;
      if (left >= kWidth) x = load(row.logits + i);
      else for (int64_t lane = 0; lane < left; ++lane) x[lane] = row.logits[i + lane];
      largest_of_all = maximum(x, largest_of_all);
      if (left >= kWidth) odd += x - x;
      else for (int64_t lane = 0; lane < left; ++lane) odd[lane] += x[lane] - x[lane];
      if (!row.greedy) x = x / row.temperature;
      if (row.allowed != nullptr && left > 0) x = allowed_only(x, row.allowed, i);
      store(r.values + i, x);
      most = maximum(x, most);
    }
    r.maxima[block] = largest(most);
    if (r.maxima[block] > r.most) {
      r.most = r.maxima[block];
      r.first_most = block;
    }
  }
  *peak = largest(largest_of_all) + sum(odd);
  int64_t at = r.first_most * kBlock;
  while (at < row.vocab - 1 && r.values[at] != r.most) ++at;
  r.first_most = at;
  return r;
}

// ------------------------------------------------------------ the threshold of top-k, top-p and min-p

// Copies the values >= `bound` to `spare`. Returns their number.
int64_t collect(const Row& r, float bound) {
  int64_t count = 0;
  for (int64_t block = 0; block < r.blocks; ++block) {
    if (r.maxima[block] < bound || r.maxima[block] == kNothing) continue;
    const float* values = r.values + block * kBlock;
    for (int i = 0; i < kBlock; ++i) {
      r.spare[count] = values[i];
      count += values[i] >= bound && values[i] > kNothing;
    }
  }
  return count;
}

// A lower bound of the `count`-th largest logit, if the row has `count` logits: the `count`-th largest maximum.
float bound_of(const Row& r, int64_t count) {
  if (count >= r.blocks) return kNothing;
  memcpy(r.spare, r.maxima, r.blocks * sizeof(float));
  return select(r.spare, r.spare + r.blocks, count - 1);
}

// The sum of exp(value - most) over the row.
float total_mass(const Row& r) {
  double total = 0;
  for (int64_t i = 0; i < r.blocks * kBlock; i += kBlock) {
    Floats part = splat(0);
    for (int64_t j = i; j < i + kBlock; j += kWidth) part += exp(load(r.values + j) - r.most);
    total += sum(part);
  }
  return static_cast<float>(total);
}

struct Nucleus {
  bool found;
  float threshold;
};

// The smallest of `count` descending values such that the values before it have less than `mass`.
Nucleus nucleus_of(const Row& r, const float* descending, int64_t count, double before, double mass) {
  float threshold = r.most;
  for (int64_t i = 0; i < count; ++i) {
    if (before >= mass) return {true, threshold};
    threshold = descending[i];
    before += __builtin_expf(threshold - r.most);
  }
  return {before >= mass, threshold};
}

// Same as `nucleus_of` over the whole row. The masses of narrow ranges locate the threshold, and only its range is sorted.
float nucleus_of_all(const Row& r, double mass) {
  double masses[kBins] = {};
  auto bin_of = [&](float value) {
    float distance = (r.most - value) * kBinsPerUnit;
    return distance < kBins - 1 ? static_cast<int>(distance) : kBins - 1;
  };
  for (int64_t i = 0; i < r.blocks * kBlock; i += kWidth) {
    Floats values = load(r.values + i), parts = exp(values - r.most);
    for (int lane = 0; lane < kWidth; ++lane)
      if (values[lane] > kNothing) masses[bin_of(values[lane])] += parts[lane];
  }
  double before = 0;
  int bin = 0;
  while (bin < kBins - 1 && before + masses[bin] < mass) before += masses[bin++];
  int64_t count = 0;
  for (int64_t i = 0; i < r.blocks * kBlock; ++i) {
    if (r.values[i] > kNothing && bin_of(r.values[i]) == bin) r.spare[count++] = r.values[i];
  }
  sort_descending(r.spare, r.spare + count);
  return nucleus_of(r, r.spare, count, before, mass).threshold;
}

float threshold_of(const SampledRow& row, const Row& r) {
  float least = r.most + row.log_min_p;
  bool has_top_k = row.top_k < row.vocab, has_top_p = row.top_p <= 1;
  if (!has_top_k && !has_top_p) return least;
  if (has_top_k) {
    int64_t count = collect(r, bound_of(r, row.top_k));
    float kth = count >= row.top_k ? select(r.spare, r.spare + count, row.top_k - 1) : kNothing;
    if (!has_top_p) return larger(least, kth);
    count = collect(r, kth);  // including ties with the last one
    sort_descending(r.spare, r.spare + count);
    double mass = 0;
    for (int64_t i = 0; i < count; ++i) mass += __builtin_expf(r.spare[i] - r.most);
    return larger(least, nucleus_of(r, r.spare, count, 0, mass * row.top_p).threshold);
  }
  double mass = static_cast<double>(total_mass(r)) * row.top_p;
  int64_t count = collect(r, bound_of(r, kFirstBlocks));
  if (count < r.blocks * kBlock / 8) {
    sort_descending(r.spare, r.spare + count);
    Nucleus nucleus = nucleus_of(r, r.spare, count, 0, mass);
    if (nucleus.found) return larger(least, nucleus.threshold);
  }
  return larger(least, nucleus_of_all(r, mass));
}

// ------------------------------------------------------------ the draw

constexpr uint32_t kGolden = 0x9E3779B9u;

RADIXRT_INLINE UInts noise_bits(UInts tokens, uint32_t low, uint32_t high) {
  UInts bits = tokens * kGolden + low;
  bits ^= bits >> 16;
  bits *= 0x7FEB352Du;
  bits ^= bits >> 15;
  bits += high;
  bits *= 0x846CA68Bu;
  bits ^= bits >> 16;
  return bits & 0x7fffffffu;
}

float gumbel(uint32_t bits) {
  float uniform = (static_cast<float>(static_cast<int32_t>(bits)) + 0.5f) * -0x1p-31f;
  if (uniform < 0x1p-24f - 1) uniform = 0x1p-24f - 1;
  return -__builtin_logf(-__builtin_log1pf(uniform));
}

int64_t draw(const SampledRow& row, const Row& r, float threshold) {
  auto low = static_cast<uint32_t>(row.noise_key), high = static_cast<uint32_t>(row.noise_key >> 32);
  auto score_of = [&](int64_t token) {
    UInts bits = noise_bits(UInts{} + static_cast<uint32_t>(token), low, high);
    return r.values[token] + gumbel(bits[0]);
  };
  int64_t best = r.first_most;
  float best_score = score_of(best);
  for (int64_t block = 0; block < r.blocks; ++block) {
    if (r.maxima[block] < threshold || r.maxima[block] == kNothing) continue;
    for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += kWidth) {
      Floats values = load(r.values + i);
      UInts bits = noise_bits(lanes() + static_cast<uint32_t>(i), low, high);
      // Noise is at most -log(u) for u = (bits + 1/2) / 2^31, and u is at least the power of two of its exponent.
      Floats uniform = (__builtin_convertvector((Ints)bits, Floats) + 0.5f) * 0x1p-31f;
      Floats most_noise = __builtin_convertvector(127 - (Ints)((UInts)uniform >> 23), Floats) * 0.6931472f + 1e-5f;
      Ints promising = (values >= threshold) & (values + most_noise >= best_score) & (values > kNothing);
      if (!any(promising)) continue;
      for (int lane = 0; lane < kWidth; ++lane) {
        if (!promising[lane]) continue;
        float score = values[lane] + gumbel(bits[lane]);
        if (score > best_score || (score == best_score && i + lane < best)) {
          best_score = score;
          best = i + lane;
        }
      }
    }
  }
  return best;
}

int64_t sample(const SampledRow& row, float* scratch, float* peak) {
  Row r = read(row, scratch, peak);
  if (row.greedy || r.most == kNothing) return r.first_most;
  return draw(row, r, threshold_of(row, r));
}

// ------------------------------------------------------------ log-probabilities

float log_sum_exp(const float* logits, int64_t count) {
  const int64_t whole = count - count % kWidth;
  Floats vector_most = splat(kNothing);
  for (int64_t i = 0; i < whole; i += kWidth) vector_most = maximum(load(logits + i), vector_most);
  float most = largest(vector_most);
  for (int64_t i = whole; i < count; ++i) most = larger(logits[i], most);
  if (most == kNothing || most == -kNothing) return most;
  double total = 0;
  for (int64_t i = 0; i < whole; i += kWidth) total += sum(exp(load(logits + i) - most));
  for (int64_t i = whole; i < count; ++i) total += exp(splat(logits[i] - most))[0];
  return most + static_cast<float>(__builtin_log(total));
}

constexpr int64_t kAddedInFloat = 64;  // vectors whose sums are added in float before they are added in double
constexpr float kFar = 60;             // e^-60 is a normal float, and so are the sums of such numbers

// Calls `add(x, i)` for each vector of logits, minus infinity behind the last. `x` are those from index `i` on.
template <class Add>
RADIXRT_INLINE void for_each_vector(const float* logits, int64_t begin, int64_t end, int64_t count, Add add) {
  for (int64_t i = begin; i < end; i += kWidth) {
    if (count - i >= kWidth) {
      add(load(logits + i), i);
    } else {
      Floats x = splat(kNothing);
      for (int64_t lane = 0; lane < count - i; ++lane) x[lane] = logits[i + lane];
      add(x, i);
    }
  }
}

float log_kept_mass(const float* logits, const uint32_t* allowed, int64_t count) {
  Floats all = splat(kNothing), kept = splat(kNothing);
  for_each_vector(logits, 0, count, count, [&](Floats x, int64_t i) {
    all = maximum(x, all);
    kept = maximum(allowed_only(x, allowed, i), kept);
  });
  float most = largest(all), most_kept = largest(kept);
  if (most_kept == kNothing || most == -kNothing) return kNothing;
  // A small share would be lost in sums that are scaled by the largest logit of all.
  float scale = most_kept < most - kFar ? most_kept : most;
  double total = 0, share = 0;
  for (int64_t begin = 0; begin < count; begin += kAddedInFloat * kWidth) {
    int64_t end = begin + kAddedInFloat * kWidth < count ? begin + kAddedInFloat * kWidth : count;
    Floats of_all = splat(0), of_kept = splat(0);
    for_each_vector(logits, begin, end, count, [&](Floats x, int64_t i) {
      Floats term = exp(x - most);
      of_all += term;
      of_kept += scale == most ? (allowed_only(x, allowed, i) == x ? term : splat(0)) : exp(allowed_only(x, allowed, i) - scale);
    });
    total += sum(of_all);
    share += sum(of_kept);
  }
  float log_share = static_cast<float>(__builtin_log(share / total) + (scale - most));
  return log_share < 0 ? log_share : 0;
}

}  // namespace
}  // namespace RADIXRT_ISA

template <>
const SamplerKernels& table_of<SamplerKernels, Isa::RADIXRT_ISA>() {
  using namespace RADIXRT_ISA;
  static constexpr SamplerKernels table{scratch_floats, sample, log_sum_exp, log_kept_mass};
  return table;
}

}  // namespace radixrt
