// The kernels' view of a tensor: pointer, dtype, shape and strides, checked before the data is read.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <string>

namespace radixrt {

enum class DType { float32, bfloat16, float16, int32, int64, int8, uint8 };

const char* name_of(DType dtype);
int size_of(DType dtype);

// A tensor; Python keeps it alive during the call.
struct Tensor {
  static constexpr int kMostDimensions = 8;

  void* data = nullptr;
  DType dtype = DType::float32;
  int dimensions = 0;
  int64_t shape[kMostDimensions] = {};
  int64_t strides[kMostDimensions] = {};  // in elements

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }

  // Elements from one index of dimension `first` to the next, if the later dimensions have no gaps.
  bool dense_after(int first) const;
  bool dense() const { return dense_after(-1); }
  int64_t elements() const;
  std::string describe() const;  // bfloat16[3, 5]
};

// Describes a CPU tensor: through DLPack's C table if its type has one (torch 2.10 and later), otherwise by its attributes.
//
// Raises TypeError or ValueError: not a tensor, not on the CPU, or an unsupported dtype.
Tensor tensor_of(nanobind::handle object);

// Raises ValueError with the text `what` and a description of `tensor`, unless `holds`.
inline void require(bool holds, const char* what, const Tensor& tensor) {
  if (!holds) [[unlikely]]
    throw nanobind::value_error((std::string(what) + "; it is " + tensor.describe()).c_str());
}

inline void require(bool holds, const char* what) {
  if (!holds) [[unlikely]]
    throw nanobind::value_error(what);
}

}  // namespace radixrt

// Bound functions take `const Tensor&`.
template <>
struct nanobind::detail::type_caster<radixrt::Tensor> {
  NB_TYPE_CASTER(radixrt::Tensor, const_name("torch.Tensor"))

  bool from_python(handle source, uint8_t, cleanup_list*) noexcept(false) {
    value = radixrt::tensor_of(source);
    return true;
  }
};
