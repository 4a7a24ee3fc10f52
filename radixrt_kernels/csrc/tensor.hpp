// What does a kernel see of a tensor? A pointer, a shape and strides, checked before anything is read.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <string>

namespace radixrt {

enum class DType { float32, bfloat16, float16, int32, int64, int8, uint8 };

const char* name_of(DType dtype);
int size_of(DType dtype);

// A tensor that Python holds on to for the length of a call.
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

  // Elements from one index of dimension `first` to the next, if the dimensions after it lie without gaps.
  bool dense_after(int first) const;
  bool dense() const { return dense_after(-1); }
  int64_t elements() const;
  std::string describe() const;  // bfloat16[3, 5]
};

// Describes a CPU tensor: through DLPack's C table where its type has one (torch 2.10 and later), else by its attributes.
//
// Raises TypeError or ValueError: no tensor, not on the CPU, or of a dtype that no kernel takes.
Tensor tensor_of(nanobind::handle object);

// Raises ValueError, worded `what` and what `tensor` is, unless `holds`.
inline void require(bool holds, const char* what, const Tensor& tensor) {
  if (!holds) [[unlikely]]
    throw nanobind::value_error((std::string(what) + "; it is " + tensor.describe()).c_str());
}

inline void require(bool holds, const char* what) {
  if (!holds) [[unlikely]]
    throw nanobind::value_error(what);
}

}  // namespace radixrt

// Functions that are bound take `const Tensor&`.
template <>
struct nanobind::detail::type_caster<radixrt::Tensor> {
  NB_TYPE_CASTER(radixrt::Tensor, const_name("torch.Tensor"))

  bool from_python(handle source, uint8_t, cleanup_list*) noexcept(false) {
    value = radixrt::tensor_of(source);
    return true;
  }
};
