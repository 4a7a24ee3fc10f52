// The quantized blocks of GGUF files, and their packed form.
//
// A GGUF row is a sequence of blocks of 32 or 256 columns with scales of their own. The packed form keeps the bits of codes and scales, in
// the order in which the kernels read them. A panel of 16 rows is a sequence of records of 256 columns; the last one may have fewer. A record
// is the scales of its blocks, padded to 64 bytes, and then the codes.
//
// Scales; [16] are the rows:
//   Q4_0, Q5_0, Q8_0  per 32 columns float16 d[16]                             weight = d (code - 8, 16 or 128)
//   MXFP4             per 32 columns uint8 exponent[16]                        weight = 2^(exponent - 128) value(code)
//   Q4_K, Q5_K        float16 d[16], m[16]; per 32 columns uint8 s[16], t[16]  weight = d s code - m t
//   Q6_K, Q3_K        float16 d[16]; per 16 columns int8 s[16]                 weight = d s (code - 32 or 4)
//   Q2_K              float16 d[16], m[16]; per 16 columns uint8 s + 16 t[16]  weight = d s code - m t
//   Q4_1, Q5_1        per 32 columns float16 d[16], m[16]                      weight = d code + m
//   IQ4_NL            per 32 columns float16 d[16]                             weight = d value(code)
//   IQ4_XS            float16 d[16]; per 32 columns int8 s[16]                 weight = d s value(code)
//   IQ3_*, IQ2_XXS    float16 d[16]; per 32 columns uint8 s[16], odd           weight = d s value(code)
//   IQ2_XS, IQ2_S     float16 d[16]; per 32 columns uint8 s + 16 t[16]         weight = d (2 s + 1) value(code); t: the last 16
// The values are in kernels/block_kinds.hpp. Codes of IQ3 and IQ2 kinds are the magnitudes and signs that their indices of a grid stand for.
//
// Codes, per 32 columns: lines of 64 bytes, each with four bytes for each row. Step s is columns 4 s to 4 s + 3.
//   2 bits        2 lines: bits 2 i and 2 i + 1 of a byte are step i, in the second line step 4 + i
//   3 bits        3 lines: bits 0 to 2 of a byte of line i are step 2 i, bits 3 to 5 step 2 i + 1. Bits 6 and 7 of lines 0 and 1 are the
//                 lower bits of steps 6 and 7, those of line 2 their third bits.
//   4, 5, 6 bits  4 lines: the low four bits of step 2 i in the low halves of line i, those of step 2 i + 1 in the high halves
//   5 bits        1 more line: bit s of a byte is the fifth bit of step s
//   6 bits        2 more lines: bits 2 i and 2 i + 1 of a byte are the upper bits of step i, in the second line of step 4 + i
//   8 bits        8 lines: a step each
#pragma once

#include <cstdint>

namespace radixrt {

inline constexpr int kBlock = 32;  // columns, which share an activation scale

enum class BlockKind {  // as in GGUF files
  q4_0 = 2, q4_1 = 3, q5_0 = 6, q5_1 = 7, q8_0 = 8, q2_k = 10, q3_k = 11, q4_k = 12, q5_k = 13, q6_k = 14,
  iq2_xxs = 16, iq2_xs = 17, iq3_xxs = 18, iq4_nl = 20, iq3_s = 21, iq2_s = 22, iq4_xs = 23, mxfp4 = 39,
};

inline constexpr int kRecordBlocks = 8;

using BlockCodes = uint8_t[kBlock];  // of 32 columns of a row

struct BlockForm {
  BlockKind kind;
  int columns;     // of a block of the file
  int file_bytes;  // of a block of the file
  int bits;        // of a code
  int head_bytes;  // of the scales of a whole record
  int part_bytes;  // of the scales of 32 columns

  // Bytes of the scales in a record of `blocks` times 32 columns.
  int64_t scale_bytes(int64_t blocks) const { return (head_bytes + blocks * part_bytes + 63) / 64 * 64; }
  int64_t record_bytes(int64_t blocks) const { return scale_bytes(blocks) + blocks * bits * 64; }
  int64_t panel_bytes(int64_t all_columns) const {
    int64_t blocks = all_columns / kBlock, rest = blocks % kRecordBlocks;
    return blocks / kRecordBlocks * record_bytes(kRecordBlocks) + (rest ? record_bytes(rest) : 0);
  }
};

// Throws std::invalid_argument if `kind` has no packed form.
const BlockForm& block_form(int kind);

// Packs a row of the file as row `lane` of `panel`.
void pack_row(const BlockForm& form, const uint8_t* row, int64_t columns, int lane, uint8_t* panel);

}  // namespace radixrt
