// Divides the products of rows and a stack of matrices into units of work.
//
// Rows are sorted by their matrix, as the tokens of a mixture of experts by their expert. The units of all matrices are divided among
// the threads together, so threads have enough work even if each matrix has one or two rows.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "bind/scratch.hpp"
#include "bind/units.hpp"
#include "tensor.hpp"

namespace radixrt {

// Rows `starts[i]` to `starts[i + 1]` belong to matrix `i`.
struct Groups {
  const int32_t* starts;
  int64_t count;
  int64_t rows;
};

inline Groups groups_of(const Tensor& starts, int64_t rows) {
  require(starts.dimensions == 1 && starts.dense() && starts.dtype == DType::int32 && starts.shape[0] >= 2,
          "starts must be [matrices + 1] int32", starts);
  Groups groups{starts.as<int32_t>(), starts.shape[0] - 1, rows};
  require(groups.starts[0] == 0 && groups.starts[groups.count] == rows, "starts must begin with 0 and end with the number of rows");
  for (int64_t i = 0; i < groups.count; ++i) require(groups.starts[i] <= groups.starts[i + 1], "starts must not descend");
  return groups;
}

// The bias of each matrix, one after the other; null without.
inline const char* biases_of(const std::optional<Tensor>& bias, const Groups& groups, int64_t rows, DType dtype) {
  if (!bias) return nullptr;
  require(bias->dimensions == 2 && bias->shape[0] == groups.count && bias->shape[1] == rows && bias->dense() && bias->dtype == dtype,
          "bias must be [matrices, rows] of hidden's dtype", *bias);
  return bias->as<char>();
}

// The input token of each row: `tokens`, or without it the row's own index.
inline const int32_t* chosen_tokens(const std::optional<Tensor>& tokens, int64_t count) {
  if (!tokens) return nullptr;
  require(tokens->dimensions == 1 && tokens->dense() && tokens->dtype == DType::int32, "tokens must be [rows] int32", *tokens);
  auto ids = tokens->as<int32_t>();
  for (int64_t i = 0; i < tokens->shape[0]; ++i)
    require(ids[i] >= 0 && ids[i] < count, "tokens must hold numbers from 0 to hidden's rows - 1");
  return ids;
}

// The consecutive inputs of all rows. `prepare(token, to)` writes the `bytes` bytes of a token, once per token.
template <class Prepare>
char* prepare_rows(int64_t tokens, const int32_t* chosen, int64_t rows, int64_t bytes, int64_t grain, Prepare&& prepare) {
  char* prepared = scratch((tokens + (chosen ? rows : 0)) * bytes);
  parallel_ranges(tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) prepare(token, prepared + token * bytes);
  });
  if (!chosen) return prepared;
  constexpr int64_t kCopiedPerThread = 64 << 10;  // bytes, in some microseconds
  char* gathered = prepared + tokens * bytes;
  parallel_ranges(rows, kCopiedPerThread / bytes + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) memcpy(gathered + row * bytes, prepared + chosen[row] * bytes, bytes);
  });
  return gathered;
}

// Calls `body(matrix, first_panel, panels, first_row, rows)` for each unit of the groups with rows. Each matrix has
// `outputs` rows.
template <class Body>
void for_each_group_unit(const Groups& groups, int64_t outputs, int64_t panel_bytes, Body&& body) {
  struct Unit {
    int32_t matrix, panel, panels, row, rows;
  };
  static thread_local std::vector<Unit> units;
  units.clear();
  int64_t panels = panels_of(outputs), in_use = 0;
  for (int64_t i = 0; i < groups.count; ++i) in_use += groups.starts[i] < groups.starts[i + 1];
  for (int64_t i = 0; i < groups.count; ++i) {
    int64_t first = groups.starts[i], rows = groups.starts[i + 1] - first;
    if (rows == 0) continue;
    int64_t size = panels_a_unit(in_use * panels, rows, panel_bytes), parts = (rows + kUnitTokens - 1) / kUnitTokens;
    for (int64_t panel = 0; panel < panels; panel += size) {
      for (int64_t part = 0; part < parts; ++part) {
        int64_t begin = rows * part / parts, end = rows * (part + 1) / parts;
        units.push_back(
            {static_cast<int32_t>(i), static_cast<int32_t>(panel), static_cast<int32_t>(panels - panel < size ? panels - panel : size),
             static_cast<int32_t>(first + begin), static_cast<int32_t>(end - begin)});
      }
    }
  }
  const Unit* all = units.data();  // `units` is thread-local, so the other threads need this pointer
  parallel_for(static_cast<int64_t>(units.size()), [all, &body](int64_t index, int) {
    const Unit& unit = all[index];
    body(unit.matrix, unit.panel, unit.panels, unit.row, unit.rows);
  });
}

}  // namespace radixrt
