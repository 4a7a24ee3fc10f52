// Memory that kernels read at random, in pages of 2 MiB.
#include <sys/mman.h>

#include "bind/bind.hpp"
#include "tensor.hpp"

namespace nb = nanobind;

namespace radixrt {

namespace {

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;

// Whether the operating system took the advice; it may still find no huge page when memory is first touched.
bool advise_huge_pages(const Tensor& tensor) {
  require(tensor.dense(), "the tensor must be without gaps", tensor);
#if defined(MADV_HUGEPAGE)
  uintptr_t begin = reinterpret_cast<uintptr_t>(tensor.data), end = begin + tensor.elements() * size_of(tensor.dtype);
  begin = (begin + kHugePage - 1) & ~(kHugePage - 1);
  end &= ~(kHugePage - 1);
  return begin < end && madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) == 0;
#else
  return false;
#endif
}

}  // namespace

void bind_memory(nb::module_& module) { module.def("advise_huge_pages", advise_huge_pages, nb::arg("tensor")); }

}  // namespace radixrt
