// Requests pages of 2 MiB from the operating system, and makes the C library keep freed memory.
#include <sys/mman.h>

#include <cstdlib>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "bind/bind.hpp"
#include "tensor.hpp"

namespace nb = nanobind;

namespace radixrt {

namespace {

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;

// Returns whether the operating system accepts. It may still have no huge page at the first access.
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

// Returns whether the C library accepts: use only the heap, and never shrink it.
bool keep_freed_memory() {
#if defined(__GLIBC__)
  return mallopt(M_MMAP_MAX, 0) == 1 && mallopt(M_TRIM_THRESHOLD, -1) == 1;
#else
  return false;
#endif
}

}  // namespace

void bind_memory(nb::module_& module) {
  module.def("advise_huge_pages", advise_huge_pages, nb::arg("tensor"));
  module.def("keep_freed_memory", keep_freed_memory);
}

}  // namespace radixrt
