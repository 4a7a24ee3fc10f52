// Packs rows of GGUF files. The forms of the blocks: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and gguf-py's quants.py.
#include "block_forms.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

namespace radixrt {

namespace {

constexpr BlockForm kForms[] = {
    {BlockKind::q4_0, 32, 18, 4},   {BlockKind::q5_0, 32, 22, 5},   {BlockKind::q8_0, 32, 34, 8}, {BlockKind::q4_k, 256, 144, 4},
    {BlockKind::q5_k, 256, 176, 5}, {BlockKind::q6_k, 256, 210, 6}, {BlockKind::mxfp4, 32, 17, 4},
};

constexpr int kLine = 64;

// The codes of 32 columns of a row.
using Codes = uint8_t[kBlock];

void put_codes(const Codes& codes, int bits, int lane, uint8_t* lines) {
  uint32_t steps[8];
  memcpy(steps, codes, sizeof steps);
  uint8_t* to = lines + 4 * lane;
  auto put = [to](int line, uint32_t four) { memcpy(to + line * kLine, &four, sizeof four); };
  if (bits == 8) {
    for (int step = 0; step < 8; ++step) put(step, steps[step]);
    return;
  }
  for (int line = 0; line < 4; ++line) put(line, (steps[2 * line] & 0x0f0f0f0fu) | (steps[2 * line + 1] & 0x0f0f0f0fu) << 4);
  if (bits == 5) {
    uint32_t upper = 0;
    for (int step = 0; step < 8; ++step) upper |= (steps[step] >> 4 & 0x01010101u) << step;
    put(4, upper);
  }
  if (bits == 6) {
    for (int half = 0; half < 2; ++half) {
      uint32_t upper = 0;
      for (int step = 0; step < 4; ++step) upper |= (steps[4 * half + step] >> 4 & 0x03030303u) << 2 * step;
      put(4 + half, upper);
    }
  }
}

// Two columns a byte: the first half of the columns in the low halves.
void put_halves(const uint8_t* bytes, Codes& codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = bytes[i] & 15;
    codes[16 + i] = bytes[i] >> 4;
  }
}

void codes_of_small_block(BlockKind kind, const uint8_t* block, Codes& codes) {
  if (kind == BlockKind::q8_0) {
    for (int i = 0; i < kBlock; ++i) codes[i] = block[2 + i] ^ 0x80;  // signed in the file
  } else if (kind == BlockKind::q5_0) {
    uint32_t upper;
    memcpy(&upper, block + 2, sizeof upper);
    put_halves(block + 6, codes);
    for (int i = 0; i < kBlock; ++i) codes[i] |= (upper >> i & 1) << 4;
  } else {
    put_halves(block + (kind == BlockKind::mxfp4 ? 1 : 2), codes);
  }
}

// Part `part` of 8 of a block of 256 columns.
void codes_of_part(BlockKind kind, const uint8_t* block, int part, Codes& codes) {
  if (kind == BlockKind::q6_k) {
    const uint8_t *low = block + 64 * (part / 4) + 32 * (part % 2), *upper = block + 128 + 32 * (part / 4);
    int low_shift = part % 4 / 2 * 4, upper_shift = part % 4 * 2;
    for (int i = 0; i < kBlock; ++i) codes[i] = (low[i] >> low_shift & 15) | (upper[i] >> upper_shift & 3) << 4;
    return;
  }
  const uint8_t* low = block + (kind == BlockKind::q5_k ? 48 : 16) + 32 * (part / 2);
  int shift = part % 2 * 4;
  for (int i = 0; i < kBlock; ++i) codes[i] = low[i] >> shift & 15;
  if (kind == BlockKind::q5_k)
    for (int i = 0; i < kBlock; ++i) codes[i] |= (block[16 + i] >> part & 1) << 4;
}

void put_scales(BlockKind kind, const uint8_t* block, int lane, uint8_t* to) {
  if (kind == BlockKind::mxfp4) {
    to[lane] = block[0];
    return;
  }
  memcpy(to + 2 * lane, block + (kind == BlockKind::q6_k ? 208 : 0), 2);
  if (kind == BlockKind::q6_k)
    for (int i = 0; i < 16; ++i) to[32 + 16 * i + lane] = block[192 + i];
  if (kind != BlockKind::q4_k && kind != BlockKind::q5_k) return;
  memcpy(to + 32 + 2 * lane, block + 2, 2);
  const uint8_t* packed = block + 4;  // the upper bits of parts 4 to 7 are in the bytes of parts 0 to 3
  for (int i = 0; i < 4; ++i) {
    uint8_t* part = to + 64 + 32 * i + lane;
    part[0] = packed[i] & 63;
    part[16] = packed[4 + i] & 63;
    part[128] = (packed[8 + i] & 15) | (packed[i] >> 2 & 48);
    part[144] = packed[8 + i] >> 4 | (packed[4 + i] >> 2 & 48);
  }
}

}  // namespace

const BlockForm& block_form(int kind) {
  for (const BlockForm& form : kForms)
    if (static_cast<int>(form.kind) == kind) return form;
  throw std::invalid_argument("there is no packed form of GGUF's kind " + std::to_string(kind));
}

void pack_row(const BlockForm& form, const uint8_t* row, int64_t columns, int lane, uint8_t* panel) {
  int64_t blocks = columns / kBlock;
  Codes codes;
  for (int64_t first = 0; first < blocks; first += kRecordBlocks) {
    int64_t count = blocks - first < kRecordBlocks ? blocks - first : kRecordBlocks;
    uint8_t* lines = panel + form.scale_bytes(count);
    if (form.columns > kBlock) put_scales(form.kind, row, lane, panel);
    for (int block = 0; block < count; ++block, lines += form.bits * kLine) {
      if (form.columns > kBlock) {
        codes_of_part(form.kind, row, block, codes);
      } else {
        put_scales(form.kind, row, lane, panel + block * (form.kind == BlockKind::mxfp4 ? 16 : 32));
        codes_of_small_block(form.kind, row, codes);
        row += form.file_bytes;
      }
      put_codes(codes, form.bits, lane, lines);
    }
    if (form.columns > kBlock) row += form.file_bytes;
    panel += form.record_bytes(count);
  }
}

}  // namespace radixrt
