// Divides the product of tokens and a packed matrix into units of work.
#pragma once

#include <cstdint>

#include "kernels/linear.hpp"
#include "threads.hpp"

namespace radixrt {

inline int64_t panels_of(int64_t rows) { return (rows + kPanel - 1) / kPanel; }

// Panels per unit for `tokens` tokens. Few tokens: reading a unit's weights should take some microseconds, more than the
// distribution of a unit; but the `all_panels` panels should give several units per thread. Many tokens: a unit's weights should
// stay in the second-level cache.
inline int64_t panels_a_unit(int64_t all_panels, int64_t tokens, int64_t panel_bytes) {
  constexpr int64_t kEnoughBytes = 96 << 10;
  int64_t enough = tokens <= kFewTokens ? kEnoughBytes / panel_bytes / kUnitPanels * kUnitPanels : 0;
  int64_t share = all_panels / (4 * num_threads()) / kUnitPanels * kUnitPanels;
  int64_t size = enough < share ? enough : share;
  return size < kUnitPanels ? kUnitPanels : size;
}

// Calls `body(first_panel, panels, first_token, tokens)` for each unit.
template <class Body>
void for_each_unit(int64_t rows, int64_t tokens, int64_t panel_bytes, Body&& body) {
  int64_t panels = panels_of(rows), size = panels_a_unit(panels, tokens, panel_bytes);
  int64_t panel_units = (panels + size - 1) / size, token_units = (tokens + kUnitTokens - 1) / kUnitTokens;
  parallel_for(panel_units * token_units, [&](int64_t unit, int) {
    int64_t panel = unit / token_units * size, part = unit % token_units;
    int64_t begin = tokens * part / token_units, end = tokens * (part + 1) / token_units;
    body(panel, static_cast<int>(panels - panel < size ? panels - panel : size), begin, static_cast<int>(end - begin));
  });
}

}  // namespace radixrt
