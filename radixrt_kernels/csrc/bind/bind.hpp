// Functions that add each kernel family to the Python module.
#pragma once

#include <nanobind/nanobind.h>

namespace radixrt {

void bind_activation(nanobind::module_& module);
void bind_blockwise(nanobind::module_& module);
void bind_groupwise(nanobind::module_& module);
void bind_linear(nanobind::module_& module);
void bind_sampler(nanobind::module_& module);
void bind_attention(nanobind::module_& module);
void bind_memory(nanobind::module_& module);
void bind_mixture(nanobind::module_& module);
void bind_norm(nanobind::module_& module);
void bind_recurrence(nanobind::module_& module);
void bind_rotary(nanobind::module_& module);

}  // namespace radixrt
