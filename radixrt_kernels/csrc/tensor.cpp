// Reads tensors through DLPack's exchange table: some tens of nanoseconds per tensor; `__dlpack__()` takes microseconds.
// The structures are those of the DLPack specification, version 1.2: https://dmlc.github.io/dlpack/latest/c_api.html
#include "tensor.hpp"

#include <nanobind/stl/string.h>

#include <cstring>

namespace nb = nanobind;

namespace radixrt {

namespace {

namespace dlpack {

struct Device {
  int32_t type;
  int32_t id;
};
constexpr int32_t kCpu = 1;

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
enum Code : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4 };

struct TensorInfo {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct ExchangeTable {
  struct {
    uint32_t major, minor;
  } version;
  ExchangeTable* previous;
  void* allocate;
  void* export_owned;
  void* import_owned;
  int (*describe)(void* py_object, TensorInfo* out);
  void* current_stream;
};

}  // namespace dlpack

// The table of a Python type, or null. The last type is cached; it is nearly always torch.Tensor.
const dlpack::ExchangeTable* exchange_table(PyTypeObject* type) {
  static PyTypeObject* last_type = nullptr;
  static const dlpack::ExchangeTable* last_table = nullptr;
  if (type == last_type) return last_table;
  const dlpack::ExchangeTable* table = nullptr;
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule != nullptr && PyCapsule_IsValid(capsule, "dlpack_exchange_api")) {
    table = static_cast<dlpack::ExchangeTable*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    while (table != nullptr && table->version.major != 1) table = table->previous;
  }
  Py_XDECREF(capsule);
  PyErr_Clear();
  Py_INCREF(type);  // another type could get the address of a freed type
  last_type = type;
  last_table = table;
  return table;
}

bool dtype_of(dlpack::DataType type, DType& dtype) {
  using namespace dlpack;
  if (type.lanes != 1) return false;
  switch (type.code << 8 | type.bits) {
    case kFloat << 8 | 32: dtype = DType::float32; return true;
    case kBfloat << 8 | 16: dtype = DType::bfloat16; return true;
    case kFloat << 8 | 16: dtype = DType::float16; return true;
    case kInt << 8 | 32: dtype = DType::int32; return true;
    case kInt << 8 | 64: dtype = DType::int64; return true;
    case kInt << 8 | 8: dtype = DType::int8; return true;
    case kUInt << 8 | 8: dtype = DType::uint8; return true;
  }
  return false;
}

[[noreturn]] void raise_dtype(const std::string& name) {
  throw nb::type_error(("no kernel takes tensors of dtype " + name).c_str());
}

Tensor by_attributes(nb::handle object) {
  if (!nb::hasattr(object, "data_ptr")) throw nb::type_error("the kernels take tensors of torch");
  Tensor tensor;
  if (nb::cast<std::string>(object.attr("device").attr("type")) != "cpu")
    throw nb::value_error("the kernels take tensors on the CPU only");
  nb::object torch_dtype = object.attr("dtype");  // nb::str() of the attribute itself is a cast, which fails
  std::string dtype = nb::cast<std::string>(nb::str(torch_dtype));
  bool known = false;
  for (DType candidate : {DType::float32, DType::bfloat16, DType::float16, DType::int32, DType::int64, DType::int8, DType::uint8}) {
    if (dtype == std::string("torch.") + name_of(candidate)) {
      tensor.dtype = candidate;
      known = true;
    }
  }
  if (!known) raise_dtype(dtype);
  tensor.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(object.attr("data_ptr")()));
  nb::object shape = object.attr("shape"), strides = object.attr("stride")();
  if (nb::len(shape) > Tensor::kMostDimensions) throw nb::value_error("the kernels take tensors of at most 8 dimensions");
  for (nb::handle size : shape) tensor.shape[tensor.dimensions++] = nb::cast<int64_t>(size);
  int i = 0;
  for (nb::handle stride : strides) tensor.strides[i++] = nb::cast<int64_t>(stride);
  return tensor;
}

Tensor by_table(const dlpack::ExchangeTable& table, nb::handle object) {
  dlpack::TensorInfo info;
  if (table.describe(object.ptr(), &info) != 0) {  // a device or dtype that DLPack does not have
    PyErr_Clear();
    return by_attributes(object);
  }
  Tensor tensor;
  if (info.device.type != dlpack::kCpu) throw nb::value_error("the kernels take tensors on the CPU only");
  if (info.ndim > Tensor::kMostDimensions) throw nb::value_error("the kernels take tensors of at most 8 dimensions");
  if (!dtype_of(info.dtype, tensor.dtype)) raise_dtype("code " + std::to_string(info.dtype.code) + " of DLPack");
  tensor.data = static_cast<char*>(info.data) + info.byte_offset;
  tensor.dimensions = info.ndim;
  int64_t stride = 1;
  for (int i = info.ndim - 1; i >= 0; --i) {
    tensor.shape[i] = info.shape[i];
    tensor.strides[i] = info.strides ? info.strides[i] : stride;
    stride *= info.shape[i];
  }
  return tensor;
}

}  // namespace

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::float32: return "float32";
    case DType::bfloat16: return "bfloat16";
    case DType::float16: return "float16";
    case DType::int32: return "int32";
    case DType::int64: return "int64";
    case DType::int8: return "int8";
    case DType::uint8: return "uint8";
  }
  __builtin_unreachable();
}

int size_of(DType dtype) {
  switch (dtype) {
    case DType::float32:
    case DType::int32: return 4;
    case DType::bfloat16:
    case DType::float16: return 2;
    case DType::int64: return 8;
    case DType::int8:
    case DType::uint8: return 1;
  }
  __builtin_unreachable();
}

bool Tensor::dense_after(int first) const {
  int64_t expected = 1;
  for (int i = dimensions - 1; i > first; --i) {
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

int64_t Tensor::elements() const {
  int64_t count = 1;
  for (int i = 0; i < dimensions; ++i) count *= shape[i];
  return count;
}

std::string Tensor::describe() const {
  std::string text = std::string(name_of(dtype)) + "[";
  for (int i = 0; i < dimensions; ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  text += "]";
  if (!dense()) {
    text += " with strides (";
    for (int i = 0; i < dimensions; ++i) text += (i ? ", " : "") + std::to_string(strides[i]);
    text += ")";
  }
  return text;
}

Tensor tensor_of(nb::handle object) {
  const dlpack::ExchangeTable* table = exchange_table(Py_TYPE(object.ptr()));
  return table ? by_table(*table, object) : by_attributes(object);
}

}  // namespace radixrt
