// SPDX-License-Identifier: Apache-2.0
#include "python/numpy_array.hpp"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "python/buffer.hpp"

namespace jaxbridge::python {
namespace {

// The used part of NumPy's C API: a table of addresses at positions that stay for a major version.
// Its headers are not needed, and so no NumPy to build.
constexpr std::size_t get_ndarray_c_version = 0;
constexpr std::size_t array_type = 2;
constexpr std::size_t new_from_descr = 94;
constexpr std::size_t set_base_object = 282;

constexpr unsigned known_major = 2;

constexpr int flag_c_contiguous = 0x0001;
constexpr int flag_f_contiguous = 0x0002;
constexpr int flag_aligned = 0x0100;
constexpr int flag_writeable = 0x0400;

// An array's fields, which are a part of the same ABI; later ones are not used.
struct array_fields {
  PyObject head;
  void* data;
  int ndim;
  const Py_ssize_t* shape;
  const Py_ssize_t* strides;
  PyObject* base;
  PyObject* descr;
  int flags;
  PyObject* weak_references;
};

using get_version_fn = unsigned int (*)();
using new_from_descr_fn = PyObject* (*)(PyTypeObject* type, PyObject* descr, int nd,
                                        const Py_ssize_t* dims, const Py_ssize_t* strides,
                                        void* data, int flags, PyObject* obj);
using set_base_object_fn = int (*)(PyObject* array, PyObject* base);

struct numpy_api {
  PyTypeObject* type = nullptr;
  new_from_descr_fn make = nullptr;
  set_base_object_fn set_base = nullptr;
  /// numpy.ndarray, for a NumPy whose table is another one.
  nb::object ndarray;
};

numpy_api find_numpy() {
  numpy_api api;
  api.ndarray = nb::module_::import_("numpy").attr("ndarray");
  const nb::object capsule =
      nb::getattr(nb::module_::import_("numpy._core.multiarray"), "_ARRAY_API", nb::none());
  if (capsule.is_none()) return api;
  auto* const table = static_cast<void**>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (table == nullptr) throw nb::python_error();
  if (reinterpret_cast<get_version_fn>(table[get_ndarray_c_version])() >> 24 != known_major) {
    return api;
  }
  api.type = static_cast<PyTypeObject*>(table[array_type]);
  api.make = reinterpret_cast<new_from_descr_fn>(table[new_from_descr]);
  api.set_base = reinterpret_cast<set_base_object_fn>(table[set_base_object]);
  return api;
}

// Found at first use, with the GIL; never destroyed: see exit.hpp.
const numpy_api& numpy() {
  static const numpy_api& api = *new numpy_api(find_numpy());
  return api;
}

nb::object& function() {
  static nb::object& kept = *new nb::object;
  return kept;
}

// Without elements there may be no address, and NumPy would allocate.
void* address_of(void* data) noexcept {
  static char nothing[16];
  return data == nullptr ? nothing : data;
}

int flags_of(bool readonly) noexcept { return flag_aligned | (readonly ? 0 : flag_writeable); }

}  // namespace

nb::object as_array(nb::handle buffer) {
  const call_buffer& b = nb::cast<call_buffer&>(buffer);
  const numpy_api& api = numpy();
  const buffer_layout& layout = *b.layout;
  if (api.make == nullptr || b.revoked || b.device.platform != platform::cpu) {
    // By the buffer protocol, whose errors say what is wrong.
    return api.ndarray(layout.shape_tuple, layout.numpy_dtype, buffer);
  }
  return array_over(buffer, layout.numpy_dtype, layout.shape, {}, b.data, b.readonly);
}

nb::object array_over(nb::handle base, nb::handle dtype, std::span<const std::int64_t> shape,
                      std::span<const std::int64_t> strides, void* data, bool readonly) {
  const numpy_api& api = numpy();
  if (api.make == nullptr) {
    throw nb::type_error("this NumPy has a C API that jaxbridge does not know; install NumPy 2");
  }
  static_assert(std::is_same_v<std::int64_t, Py_ssize_t>);
  Py_INCREF(dtype.ptr());  // taken by the array
  PyObject* const made = api.make(api.type, dtype.ptr(), static_cast<int>(shape.size()),
                                  shape.data(), strides.empty() ? nullptr : strides.data(),
                                  address_of(data), flags_of(readonly), nullptr);
  if (made == nullptr) throw nb::python_error();
  nb::object array = nb::steal(made);
  Py_INCREF(base.ptr());  // taken by the array
  if (api.set_base(made, base.ptr()) != 0) throw nb::python_error();
  return array;
}

bool is_as_new(nb::handle array, nb::handle buffer) noexcept {
  if (Py_REFCNT(array.ptr()) != 1 || numpy().make == nullptr) return false;
  const auto& a = *reinterpret_cast<const array_fields*>(array.ptr());
  const call_buffer& b = *nb::inst_ptr<call_buffer>(buffer);
  const buffer_layout& layout = *b.layout;
  // Contiguity follows from shape and strides.
  constexpr int derived = flag_c_contiguous | flag_f_contiguous;
  return a.data == address_of(b.data) && a.base == buffer.ptr() &&
         a.descr == layout.numpy_dtype.ptr() && (a.flags & ~derived) == flags_of(b.readonly) &&
         a.weak_references == nullptr && a.ndim == static_cast<int>(layout.shape.size()) &&
         std::equal(layout.shape.begin(), layout.shape.end(), a.shape) &&
         std::equal(layout.strides.begin(), layout.strides.end(), a.strides);
}

nb::handle as_array_function() { return function(); }

bool is_dense_at(nb::handle array, std::uintptr_t address, std::size_t bytes) {
  Py_buffer seen;
  if (PyObject_GetBuffer(array.ptr(), &seen, PyBUF_CONTIG) != 0) {
    PyErr_Clear();
    return false;
  }
  const bool same = reinterpret_cast<std::uintptr_t>(seen.buf) == address &&
                    static_cast<std::size_t>(seen.len) == bytes;
  PyBuffer_Release(&seen);
  return same;
}

void bind_numpy_array(nb::module_& m) {
  m.def("is_dense_at", &is_dense_at, nb::arg("array"), nb::arg("pointer"), nb::arg("nbytes"),
        nb::sig("def is_dense_at(array: object, pointer: int, nbytes: int) -> bool"),
        "Whether an object with the buffer protocol is writable, row-major and has that memory.");
  m.def("as_array", &as_array, nb::arg("buffer"),
        nb::sig("def as_array(buffer: Buffer) -> numpy.ndarray"),
        "A NumPy array over a buffer on the CPU, which is its base.");
  function() = m.attr("as_array");
}

}  // namespace jaxbridge::python
