// The tables of families that are not compiled for an instruction set: those of the set below it.
#include "isa.hpp"
#include "kernels/activation.hpp"
#include "kernels/attention.hpp"
#include "kernels/blockwise.hpp"
#include "kernels/groupwise.hpp"
#include "kernels/linear.hpp"
#include "kernels/mixture.hpp"
#include "kernels/norm.hpp"
#include "kernels/recurrence.hpp"
#include "kernels/rotary.hpp"
#include "kernels/sampler.hpp"

namespace radixrt {

// All are declared first, because the set below may share its table, too.
#define RADIXRT_DECLARE(Table, isa, below) \
  template <>                              \
  const Table& table_of<Table, Isa::isa>();
RADIXRT_FOR_EACH_SHARED(RADIXRT_DECLARE)
#undef RADIXRT_DECLARE

#define RADIXRT_DEFINE(Table, isa, below)    \
  template <>                                \
  const Table& table_of<Table, Isa::isa>() { \
    return table_of<Table, Isa::below>();    \
  }
RADIXRT_FOR_EACH_SHARED(RADIXRT_DEFINE)
#undef RADIXRT_DEFINE

}  // namespace radixrt
