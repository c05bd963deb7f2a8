// SPDX-License-Identifier: Apache-2.0
#include "python/capsule.hpp"

#include "core/exit.hpp"
#include "jaxbridge/abi/dlpack.hpp"
#include "python/gil.hpp"

namespace jaxbridge::python {
namespace {

namespace dlpack = abi::dlpack;

constexpr const char* unversioned_name = "dltensor";
constexpr const char* versioned_name = "dltensor_versioned";

template <class Managed>
void free_unconsumed(PyObject* capsule, const char* name) noexcept {
  if (PyCapsule_IsValid(capsule, name) == 0) return;
  auto* tensor = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
  if (tensor->deleter != nullptr) tensor->deleter(tensor);
}

template <class Managed>
nb::object wrap(const memory::dlpack_source& source, const result<Managed*>& made, const char* name,
                PyCapsule_Destructor free) {
  if (!made.ok()) {
    if (source.release != nullptr) source.release(source.owner);
    throw nb::buffer_error(made.error().message().c_str());
  }
  PyObject* const capsule = PyCapsule_New(made.value(), name, free);
  if (capsule == nullptr) {
    made.value()->deleter(made.value());
    throw nb::python_error();
  }
  return nb::steal(capsule);
}

template <class Managed>
memory::dlpack_tensor take(nb::handle capsule, const char* name, const char* used) {
  auto* const tensor = static_cast<Managed*>(PyCapsule_GetPointer(capsule.ptr(), name));
  if (PyCapsule_SetName(capsule.ptr(), used) != 0) throw nb::python_error();
  return memory::dlpack_tensor(tensor);
}

}  // namespace

nb::object make_capsule(const memory::dlpack_source& source, bool versioned) {
  if (versioned) {
    return wrap(source, memory::export_versioned(source), versioned_name, [](PyObject* c) {
      free_unconsumed<dlpack::managed_tensor_versioned>(c, versioned_name);
    });
  }
  return wrap(source, memory::export_unversioned(source), unversioned_name,
              [](PyObject* c) { free_unconsumed<dlpack::managed_tensor>(c, unversioned_name); });
}

void release_reference(void* object) noexcept {
  // Consumers delete on any thread, without the GIL, and at exit.
  const python_use use;
  if (!use.granted()) return;
  const thread_gil gil;
  Py_DECREF(static_cast<PyObject*>(object));
}

memory::dlpack_tensor take_tensor(nb::handle capsule) {
  if (PyCapsule_IsValid(capsule.ptr(), versioned_name) != 0) {
    return take<dlpack::managed_tensor_versioned>(capsule, versioned_name,
                                                  "used_dltensor_versioned");
  }
  if (PyCapsule_IsValid(capsule.ptr(), unversioned_name) != 0) {
    return take<dlpack::managed_tensor>(capsule, unversioned_name, "used_dltensor");
  }
  if (PyCapsule_CheckExact(capsule.ptr()) != 0) {
    throw nb::type_error(
        "the capsule holds no DLPack tensor, or has been consumed already: a capsule can be taken "
        "once; ask its producer for a new one");
  }
  throw nb::type_error("__dlpack__ must return a capsule with a DLPack tensor");
}

}  // namespace jaxbridge::python
