// Packs rows of GGUF files. The forms of the blocks: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and gguf-py's quants.py.
#include "block_forms.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

#include "block_grids.hpp"

namespace radixrt {

namespace {

constexpr BlockForm kForms[] = {
    {BlockKind::q4_0, 32, 18, 4, 0, 32},      {BlockKind::q4_1, 32, 20, 4, 0, 64},      {BlockKind::q5_0, 32, 22, 5, 0, 32},
    {BlockKind::q5_1, 32, 24, 5, 0, 64},      {BlockKind::q8_0, 32, 34, 8, 0, 32},      {BlockKind::q2_k, 256, 84, 2, 64, 32},
    {BlockKind::q3_k, 256, 110, 3, 32, 32},   {BlockKind::q4_k, 256, 144, 4, 64, 32},   {BlockKind::q5_k, 256, 176, 5, 64, 32},
    {BlockKind::q6_k, 256, 210, 6, 32, 32},   {BlockKind::iq2_xxs, 256, 66, 3, 32, 16}, {BlockKind::iq2_xs, 256, 74, 3, 32, 16},
    {BlockKind::iq3_xxs, 256, 98, 4, 32, 16}, {BlockKind::iq4_nl, 32, 18, 4, 0, 32},    {BlockKind::iq3_s, 256, 110, 4, 32, 16},
    {BlockKind::iq2_s, 256, 82, 3, 32, 16},   {BlockKind::iq4_xs, 256, 136, 4, 32, 16}, {BlockKind::mxfp4, 32, 17, 4, 0, 16},
};

constexpr int kLine = 64;

void put_codes(const BlockCodes& codes, int bits, int lane, uint8_t* lines) {
  uint32_t steps[8];
  memcpy(steps, codes, sizeof steps);
  uint8_t* to = lines + 4 * lane;
  auto put = [to](int line, uint32_t four) { memcpy(to + line * kLine, &four, sizeof four); };
  if (bits == 8) {
    for (int step = 0; step < 8; ++step) put(step, steps[step]);
    return;
  }
  if (bits == 2) {
    for (int half = 0; half < 2; ++half) {
      uint32_t line = 0;
      for (int step = 0; step < 4; ++step) line |= steps[4 * half + step] << 2 * step;
      put(half, line);
    }
    return;
  }
  if (bits == 3) {
    uint32_t upper = (steps[6] >> 2 & 0x01010101u) << 6 | (steps[7] >> 2 & 0x01010101u) << 7;
    const uint32_t rest[3] = {(steps[6] & 0x03030303u) << 6, (steps[7] & 0x03030303u) << 6, upper};
    for (int line = 0; line < 3; ++line) put(line, steps[2 * line] | steps[2 * line + 1] << 3 | rest[line]);
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
void put_halves(const uint8_t* bytes, BlockCodes& codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = bytes[i] & 15;
    codes[16 + i] = bytes[i] >> 4;
  }
}

void codes_of_small_block(const BlockForm& form, const uint8_t* block, BlockCodes& codes) {
  if (form.kind == BlockKind::q8_0) {
    for (int i = 0; i < kBlock; ++i) codes[i] = block[2 + i] ^ 0x80;  // signed in the file
    return;
  }
  const uint8_t* low = block + form.file_bytes - 16;
  put_halves(low, codes);
  if (form.bits == 5) {
    uint32_t upper;
    memcpy(&upper, low - 4, sizeof upper);
    for (int i = 0; i < kBlock; ++i) codes[i] |= (upper >> i & 1) << 4;
  }
}

// Part `part` of 8 of a block of 256 columns.
void codes_of_part(BlockKind kind, const uint8_t* block, int part, BlockCodes& codes) {
  auto take = [&codes](const uint8_t* bytes, int shift, int mask) {
    for (int i = 0; i < kBlock; ++i) codes[i] = bytes[i] >> shift & mask;
  };
  auto add = [&codes](const uint8_t* bytes, int shift, int mask, int place) {
    for (int i = 0; i < kBlock; ++i) codes[i] |= (bytes[i] >> shift & mask) << place;
  };
  int quarter = part % 4;
  switch (kind) {
    case BlockKind::q2_k: return take(block + 16 + 32 * (part / 4), 2 * quarter, 3);
    case BlockKind::q3_k: take(block + 32 + 32 * (part / 4), 2 * quarter, 3); return add(block, part, 1, 2);
    case BlockKind::q4_k: return take(block + 16 + 32 * (part / 2), part % 2 * 4, 15);
    case BlockKind::q5_k: take(block + 48 + 32 * (part / 2), part % 2 * 4, 15); return add(block + 16, part, 1, 4);
    case BlockKind::q6_k:
      take(block + 64 * (part / 4) + 32 * (part % 2), quarter / 2 * 4, 15);
      return add(block + 128 + 32 * (part / 4), quarter * 2, 3, 4);
    case BlockKind::iq4_xs: return put_halves(block + 8 + 16 * part, codes);
    default: return codes_of_grid(kind, block, part, codes);
  }
}

// `to`: of a small block, else of a record.
void put_scales(BlockKind kind, const uint8_t* block, int lane, uint8_t* to) {
  auto put_half = [&](int place, int from) { memcpy(to + place + 2 * lane, block + from, 2); };
  uint8_t* parts = to + 32 + lane;  // in a record of kinds without minimum
  switch (kind) {
    case BlockKind::mxfp4: to[lane] = block[0]; return;
    case BlockKind::q4_1:
    case BlockKind::q5_1: put_half(32, 2); [[fallthrough]];
    case BlockKind::q4_0:
    case BlockKind::q5_0:
    case BlockKind::q8_0:
    case BlockKind::iq4_nl: return put_half(0, 0);
    case BlockKind::q6_k:
      put_half(0, 208);
      for (int i = 0; i < 16; ++i) parts[16 * i] = block[192 + i];
      return;
    case BlockKind::q3_k: {
      put_half(0, 108);
      const uint8_t *low = block + 96, *upper = block + 104;
      for (int i = 0; i < 16; ++i) parts[16 * i] = ((low[i % 8] >> i / 8 * 4 & 15) | (upper[i % 4] >> i / 4 * 2 & 3) << 4) - 32;
      return;
    }
    case BlockKind::q2_k:
      put_half(0, 80);
      put_half(32, 82);
      for (int i = 0; i < 16; ++i) parts[32 + 16 * i] = block[i];
      return;
    case BlockKind::iq4_xs: {
      put_half(0, 0);
      int upper = block[2] | block[3] << 8;
      for (int i = 0; i < 8; ++i) parts[16 * i] = ((block[4 + i / 2] >> i % 2 * 4 & 15) | (upper >> 2 * i & 3) << 4) - 32;
      return;
    }
    case BlockKind::q4_k:
    case BlockKind::q5_k: {
      put_half(0, 0);
      put_half(32, 2);
      const uint8_t* packed = block + 4;  // the upper bits of parts 4 to 7 are in the bytes of parts 0 to 3
      for (int i = 0; i < 4; ++i) {
        uint8_t* part = parts + 32 + 32 * i;
        part[0] = packed[i] & 63;
        part[16] = packed[4 + i] & 63;
        part[128] = (packed[8 + i] & 15) | (packed[i] >> 2 & 48);
        part[144] = packed[8 + i] >> 4 | (packed[4 + i] >> 2 & 48);
      }
      return;
    }
    default:
      put_half(0, 0);
      for (int i = 0; i < 8; ++i) parts[16 * i] = scale_of_grid(kind, block, i);
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
  BlockCodes codes;
  for (int64_t first = 0; first < blocks; first += kRecordBlocks) {
    int64_t count = blocks - first < kRecordBlocks ? blocks - first : kRecordBlocks;
    uint8_t* lines = panel + form.scale_bytes(count);
    if (form.columns > kBlock) put_scales(form.kind, row, lane, panel);
    for (int block = 0; block < count; ++block, lines += form.bits * kLine) {
      if (form.columns > kBlock) {
        codes_of_part(form.kind, row, block, codes);
      } else {
        put_scales(form.kind, row, lane, panel + block * form.part_bytes);
        codes_of_small_block(form, row, codes);
        row += form.file_bytes;
      }
      put_codes(codes, form.bits, lane, lines);
    }
    if (form.columns > kBlock) row += form.file_bytes;
    panel += form.record_bytes(count);
  }
}

}  // namespace radixrt
