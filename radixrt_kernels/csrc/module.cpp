// The Python module radixrt_kernels._native: instruction set, number of threads, and the kernels.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.hpp"
#include "isa.hpp"
#include "same_products.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using namespace radixrt;

NB_MODULE(_native, module) {
  module.def("isa", [] { return std::string(name_of(isa_in_use)); });
  module.def("use_isa", [](const std::string& name) { isa_in_use = usable_isa(name); }, nb::arg("name"));
  module.def(
      "same_products",
      [](const std::string& one, const std::string& other) { return same_products(usable_isa(one), usable_isa(other)); },
      nb::arg("one"), nb::arg("other"));
  module.def("usable_isas", [] {
    std::vector<std::string> names;
    for (Isa isa : usable_isas()) names.push_back(name_of(isa));
    return names;
  });
  module.def("num_threads", num_threads);
  module.def(
      "set_num_threads",
      [](int threads) {
        if (threads < 1) throw nb::value_error(("the number of threads must be at least 1, not " + std::to_string(threads)).c_str());
        nb::gil_scoped_release release;
        set_num_threads(threads);
      },
      nb::arg("threads"));
  bind_activation(module);
  bind_blockwise(module);
  bind_groupwise(module);
  bind_linear(module);
  bind_sampler(module);
  bind_attention(module);
  bind_memory(module);
  bind_mixture(module);
  bind_norm(module);
  bind_recurrence(module);
  bind_rotary(module);
}
